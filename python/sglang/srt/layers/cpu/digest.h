// Two 64-bit sums over the bytes of a tensor, for `hs_word_sums`.
#pragma once

#include <cstdint>
#include <cstring>

// Word i (from 0, little endian) contributes mix(word + (i + 1) * golden ratio) to the first sum
// and a second mix of that value to the other. The mix is the finaliser of SplitMix64 (Steele, Lea
// and Flood, 2014), a bijection: one changed word always changes the first sum. Both sums are
// modulo 2^64, so the order of the words' contributions does not matter, only their places.
constexpr uint64_t DIGEST_STEP = 0x9E3779B97F4A7C15, DIGEST_A = 0xBF58476D1CE4E5B9,
                   DIGEST_B = 0x94D049BB133111EB, DIGEST_C = 0xD6E8FEB86659FD93;

struct WordSums {
  uint64_t first = 0, second = 0;

  inline void add(uint64_t word, uint64_t index) {
    uint64_t z = word + (index + 1) * DIGEST_STEP;
    z = (z ^ (z >> 30)) * DIGEST_A;
    z = (z ^ (z >> 27)) * DIGEST_B;
    z ^= z >> 31;
    first += z;
    z *= DIGEST_C;
    second += z ^ (z >> 32);
  }
};

inline uint64_t load_word(const char *p, int64_t size = 8) {
  uint64_t word = 0;  // missing bytes of the last word are zero
  memcpy(&word, p, size);
  return word;
}

static WordSums word_sums(const char *data, int64_t num_bytes, int nt) {
  constexpr int64_t PIECE = 1 << 15;  // words a task
  int64_t num_words = num_bytes / 8;
  if (num_words < 2 * PIECE) nt = 1;
  uint64_t first = 0, second = 0;
#pragma omp parallel for num_threads(nt) schedule(static) reduction(+ : first, second)
  for (int64_t begin = 0; begin < num_words; begin += PIECE) {
    int64_t end = begin + PIECE < num_words ? begin + PIECE : num_words;
    WordSums sums;
    for (int64_t i = begin; i < end; i++) {
      uint64_t word;
      memcpy(&word, data + i * 8, 8);
      sums.add(word, i);
    }
    first += sums.first;
    second += sums.second;
  }
  WordSums sums = {first, second};
  int64_t rest = num_bytes % 8;
  if (rest) sums.add(load_word(data + num_words * 8, rest), num_words);
  return sums;
}
