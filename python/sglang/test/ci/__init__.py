"""Registration of test files with continuous integration."""
