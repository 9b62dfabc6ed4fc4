//! Helpers for the kernel tests.
