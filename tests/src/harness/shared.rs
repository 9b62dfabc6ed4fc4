//! What the tests of one executable share: the host, one at a time, and a daemon, because starting one takes seconds
//! on an emulated machine.
use std::{
    fs::File,
    ops::Deref,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
};

use super::{Bench, Daemon, Device};

/// Whether some test has its turn.
static BUSY: Mutex<bool> = Mutex::new(false);
static FREE: Condvar = Condvar::new();
/// The daemon for whoever needs none of its own.
static DAEMON: Mutex<Option<Daemon<Arc<Bench>>>> = Mutex::new(None);

fn lock<T>(mutex: &'static Mutex<T>) -> MutexGuard<'static, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to use the host's devices. One executable at a time has it, and in that one test at a time.
#[derive(Debug)]
pub(super) struct Turn(());

impl Turn {
    pub(super) fn wait() -> Self {
        static HOST: OnceLock<File> = OnceLock::new();
        let mut busy = lock(&BUSY);
        while *busy {
            busy = FREE.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        *busy = true;
        drop(busy);
        let turn = Self(());
        HOST.get_or_init(|| {
            let path = std::env::temp_dir().join("gpureap-tests.lock");
            let file = File::create(path).expect("the lock file of the tests");
            file.lock().expect("the lock of the tests");
            file
        });
        turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *lock(&BUSY) = false;
        FREE.notify_one();
    }
}

/// A bench with a running daemon, for one test after the other. A test that fails takes the daemon down with it, so
/// that it cannot make the next one fail.
pub struct Shared {
    bench: Arc<Bench>,
    _turn: Turn,
}

impl Shared {
    /// The daemon is started by whoever comes first; all of one executable ask for the same devices.
    pub fn new(devices: &[Device]) -> Self {
        let turn = Turn::wait();
        let mut daemon = lock(&DAEMON);
        if !daemon.as_mut().is_some_and(Daemon::runs) {
            *daemon = None;
            *daemon = Some(Daemon::start(Arc::new(Bench::in_turn(devices, None))));
            at_exit();
        }
        let bench = Arc::clone(daemon.as_ref().expect("started").bench());
        assert_eq!(bench.devices, devices, "one shared daemon in an executable");
        Self { bench, _turn: turn }
    }
}

impl Deref for Shared {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.bench
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if std::thread::panicking() {
            stop();
        }
    }
}

extern "C" fn stop() {
    let daemon = lock(&DAEMON).take();
    drop(daemon);
}

/// A static is never dropped, and the daemon would outlive the tests.
fn at_exit() {
    static ASKED: OnceLock<()> = OnceLock::new();
    ASKED.get_or_init(|| {
        // SAFETY: the function takes nothing, and what it uses is never dropped.
        let refused = unsafe { libc::atexit(stop) };
        assert_eq!(refused, 0, "atexit");
    });
}
