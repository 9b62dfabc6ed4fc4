//! A process that performs real kernel operations on a device and says what is true after each of them.
fn main() -> std::process::ExitCode {
    gpureap_tests::actor::main()
}
