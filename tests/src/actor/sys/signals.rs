//! What a process does with signals.

use super::{must, ptr};

pub fn signal_ignore(signal: i32) {
    // SAFETY: no handler is installed, only a disposition.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

pub fn signal_default(signal: i32) {
    // SAFETY: as above.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Calls the function, which must do no more than a signal handler may, when the signal comes.
pub fn handle(signal: i32, handler: extern "C" fn(i32)) {
    // SAFETY: the handler is a function of the right type that lives as long as the process.
    unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
}

/// Sends the signal to the calling thread.
pub fn raise(signal: i32) {
    // SAFETY: no memory is passed.
    must("raise", unsafe { libc::raise(signal) }.into());
}

/// Makes the kernel send SIGSEGV to the calling thread.
pub fn fault() {
    // Whatever the runtime has installed to tell of a stack that is too small is of no interest here.
    signal_default(libc::SIGSEGV);
    // SAFETY: it is not safe, and that is what it is for: nothing is ever mapped at this address, so nothing is written.
    unsafe { std::arch::asm!("mov byte ptr [{at}], 1", at = in(reg) 8_usize) };
}

/// Blocks the signals and returns the set for [`wait_signal`].
pub fn block_signals(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: an all-zero set is a valid value that sigemptyset then makes canonical.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
        set
    }
}

/// Waits for a blocked signal up to the milliseconds.
pub fn wait_signal(set: &libc::sigset_t, ms: i64) -> Option<i32> {
    let limit = libc::timespec { tv_sec: ms / 1000, tv_nsec: (ms % 1000) * 1_000_000 };
    // SAFETY: both structures are live; no information about the signal is asked for.
    let signal = unsafe { libc::sigtimedwait(set, ptr::null_mut(), &raw const limit) };
    (signal > 0).then_some(signal)
}
