"""Buckets of tensors: every stride, dtype and form of sender; damage is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang.srt.utils.serialization import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import (
    FlattenedTensorBucket,
    FlattenedTensorMetadata,
    LocalSerializedTensor,
)


def named_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("plain", torch.randn(4, 6)),
        ("transposed", torch.randn(4, 6).t()),
        ("strided", torch.randn(8, 8)[::2, 1::3]),
        ("expanded", torch.randn(1, 3).expand(5, 3)),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.empty(0, 7)),
        ("half", torch.randn(3, 3).to(torch.bfloat16)),
        ("small", torch.arange(3, dtype=torch.uint8)),
        ("unaligned", torch.randn(5)),
    ]


def assert_same(got: list[tuple[str, torch.Tensor]], want: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in got] == [name for name, _ in want]
    for (name, left), (_, right) in zip(got, want):
        assert left.dtype == right.dtype and left.shape == right.shape, name
        assert torch.equal(left, right), name


def test_tensors_come_back() -> None:
    tensors = named_tensors()
    bucket = FlattenedTensorBucket(named_tensors=tensors)
    flat = bucket.get_flattened_tensor()
    assert flat.dtype == torch.uint8 and flat.dim() == 1
    assert bucket.get_metadata()[-1].end_idx == flat.numel()
    assert_same(bucket.reconstruct_tensors(), tensors)
    again = FlattenedTensorBucket(flattened_tensor=flat, metadata=bucket.get_metadata())
    assert_same(again.reconstruct_tensors(), tensors)


def test_an_empty_bucket_to_receive_into_has_the_senders_layout() -> None:
    tensors = named_tensors()
    sent = FlattenedTensorBucket(named_tensors=tensors)
    received = FlattenedTensorBucket.empty(
        [name for name, _ in tensors],
        [tensor.dtype for _, tensor in tensors],
        [list(tensor.shape) for _, tensor in tensors],
        "cpu",
    )
    received.get_flattened_tensor().copy_(sent.get_flattened_tensor())
    assert received.get_metadata() == sent.get_metadata()
    assert_same(received.reconstruct_tensors(), tensors)


def test_buckets_that_count_elements_are_read() -> None:
    first, second = torch.randn(2, 3), torch.randn(4)
    flat = torch.cat([first.flatten(), second])
    metadata = [
        FlattenedTensorMetadata("a", torch.Size([2, 3]), torch.float32, 0, 6, 6),
        FlattenedTensorMetadata("b", torch.Size([4]), torch.float32, 6, 10, 4),
    ]
    bucket = FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata)
    assert_same(bucket.reconstruct_tensors(), [("a", first), ("b", second)])


def test_nothing_in_a_bucket() -> None:
    with pytest.raises(ValueError, match="empty"):
        FlattenedTensorBucket(named_tensors=[])
    with pytest.raises(ValueError):
        FlattenedTensorBucket()
    padding = FlattenedTensorBucket(flattened_tensor=torch.empty(0, dtype=torch.uint8), metadata=[])
    assert padding.reconstruct_tensors() == []
    assert FlattenedTensorBucket.supports_multi_dtypes is True


@pytest.mark.parametrize(
    "change", [{"end_idx": 60}, {"start_idx": -4}, {"shape": torch.Size([5])}, {"end_idx": 8}]
)
def test_metadata_that_does_not_fit_is_named(change: dict[str, object]) -> None:
    bucket = FlattenedTensorBucket(named_tensors=[("w", torch.ones(4)), ("v", torch.ones(2))])
    metadata = bucket.get_metadata()
    metadata[0] = dataclasses.replace(metadata[0], **change)  # type: ignore[arg-type]
    broken = FlattenedTensorBucket(
        flattened_tensor=bucket.get_flattened_tensor(), metadata=metadata
    )
    with pytest.raises(ValueError, match="w"):
        broken.reconstruct_tensors()


def test_a_truncated_buffer_is_refused() -> None:
    bucket = FlattenedTensorBucket(named_tensors=[("w", torch.ones(4)), ("v", torch.ones(2))])
    short = FlattenedTensorBucket(
        flattened_tensor=bucket.get_flattened_tensor()[:-1], metadata=bucket.get_metadata()
    )
    with pytest.raises(ValueError, match="v"):
        short.reconstruct_tensors()


def test_each_rank_reads_its_own_copy() -> None:
    values = [MultiprocessingSerializer.serialize(torch.full((2,), float(i))) for i in range(2)]
    local = LocalSerializedTensor(values=values)
    assert [local.get(rank).tolist() for rank in range(2)] == [[0, 0], [1, 1]]
    with pytest.raises(ValueError, match="2 ranks"):
        local.get(2)
    with pytest.raises(ValueError, match="int"):
        LocalSerializedTensor(values=[MultiprocessingSerializer.serialize(3)]).get(0)
