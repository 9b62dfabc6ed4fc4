#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| gpureap::fuzzing::run("proc_stat", input));
