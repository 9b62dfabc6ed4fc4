//! One boot of a VM: its console watched for a dying kernel, its test channel passed on line by line.

use std::{
    fmt::Write as _,
    io::{BufRead as _, BufReader, Read},
    os::unix::net::UnixListener,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

/// No kernel says any of these and then carries on well.
const FATAL: &[&str] = &[
    "Kernel panic",
    "Oops:",
    "BUG: ",
    "kernel BUG at",
    "soft lockup",
    "hard LOCKUP",
    "detected stall",
    "kthread starved",
    "blocked for more than",
    "Out of memory and no killable processes",
];

/// MiB that are enough for tests.
pub(crate) const MEMORY: u32 = 2048;

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Accel {
    /// Emulation, which works everywhere.
    Tcg,
    Kvm,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Processors {
    Two,
    /// One, whose clock counts its instructions, a nanosecond for each: the same work takes the same time.
    Counted,
}

pub(crate) struct Boot<'a> {
    pub(crate) accel: Accel,
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) processors: Processors,
    /// In MiB.
    pub(crate) memory: u32,
    /// Words added to the kernel's command line.
    pub(crate) append: &'a [String],
    /// The VM may run for this long altogether…
    pub(crate) timeout: Duration,
    /// …and be silent for this long.
    pub(crate) silence: Duration,
}

/// How the VM ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It powered off by itself.
    Off,
    /// We stopped it, because of this.
    Killed(String),
}

enum Said {
    Console(String),
    Test(String),
    ConsoleClosed,
}

impl Boot<'_> {
    /// Boots, gives each line of the test channel to `test_line`, and returns when QEMU has ended.
    pub(crate) fn run(&self, mut test_line: impl FnMut(&str)) -> Result<End> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("tests");
        let listener = UnixListener::bind(&socket).context("cannot listen for the VM's test channel")?;
        let mut vm = Vm(self.command(&socket).spawn().context("cannot start qemu-system-x86_64")?);

        let (sender, said) = mpsc::channel();
        let console = vm.0.stdout.take().expect("stdout is piped");
        let for_console = sender.clone();
        thread::spawn(move || {
            forward(console, &for_console, Said::Console);
            // Nobody listens any more if this fails, which is what it would say.
            drop(for_console.send(Said::ConsoleClosed));
        });
        // If QEMU never connects, this thread stays behind in `accept`; we do not wait for it.
        thread::spawn(move || {
            if let Ok((stream, _)) = listener.accept() {
                forward(stream, &sender, Said::Test);
            }
        });

        let started = Instant::now();
        // Once it is clear how the VM ends, what it still says gets a moment.
        let mut ending: Option<(End, Instant)> = None;
        loop {
            let patience = match &ending {
                Some((_, until)) => until.saturating_duration_since(Instant::now()),
                None => self.timeout.saturating_sub(started.elapsed()).min(self.silence),
            };
            match said.recv_timeout(patience) {
                Ok(Said::Test(line)) => test_line(&line),
                Ok(Said::Console(line)) => {
                    println!("[kernel] {line}");
                    if let Some(found) = fatal(&line) {
                        let end = End::Killed(format!("the kernel said {found:?}"));
                        ending.get_or_insert((end, Instant::now() + Duration::from_secs(5)));
                    }
                }
                Ok(Said::ConsoleClosed) => {
                    let (_, until) = ending.get_or_insert((End::Off, Instant::now()));
                    *until = Instant::now() + Duration::from_secs(1);
                }
                Err(RecvTimeoutError::Timeout) if ending.is_none() => {
                    let why = if started.elapsed() >= self.timeout {
                        format!("not done after {} s", self.timeout.as_secs())
                    } else {
                        format!("silent for {} s", self.silence.as_secs())
                    };
                    // Its last words, perhaps half a line, come out once the channels close.
                    vm.0.kill()?;
                    ending = Some((End::Killed(why), Instant::now() + Duration::from_secs(1)));
                }
                Err(_) => return Ok(ending.map_or(End::Off, |(end, _)| end)),
            }
        }
    }

    fn command(&self, socket: &Path) -> Command {
        // panic=-1 with -no-reboot ends QEMU; a busy host must not look like a stalled guest.
        let mut append =
            "console=ttyS0 panic=-1 oops=panic loglevel=5 rcupdate.rcu_cpu_stall_timeout=120 no_timer_check".to_owned();
        for word in self.append {
            write!(append, " {word}").expect("a String takes everything");
        }
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(match self.accel {
                Accel::Tcg => ["-accel", "tcg,thread=single", "-cpu", "max"],
                Accel::Kvm => ["-accel", "kvm", "-cpu", "host"],
            })
            // Two processors on one host thread: with a thread each, QEMU 7.2 runs stale code while the kernel patches its own
            // text, as every attach and detach does ("Oops: int3").
            .args(match self.processors {
                Processors::Two => ["-smp", "2"].as_slice(),
                Processors::Counted => &["-smp", "1", "-icount", "shift=0,sleep=off"],
            })
            .arg("-m")
            .arg(format!("{}M", self.memory))
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
            .args(["-serial", "stdio"])
            .arg("-chardev")
            .arg(format!("socket,id=tests,path={}", socket.display()))
            .args(["-serial", "chardev:tests", "-object", "rng-random,id=rng,filename=/dev/urandom"])
            .args(["-device", "virtio-rng-pci,rng=rng"])
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs)
            .args(["-append", &append])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    }
}

/// The QEMU process; it does not outlive us.
struct Vm(Child);

impl Drop for Vm {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn forward(from: impl Read, to: &Sender<Said>, wrap: fn(String) -> Said) {
    let mut reader = BufReader::new(from);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        let text = String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned();
        if to.send(wrap(text)).is_err() {
            return;
        }
        line.clear();
    }
}

fn fatal(line: &str) -> Option<&'static str> {
    FATAL.iter().copied().find(|mark| line.contains(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dying_kernels_are_recognised() {
        for line in [
            "[    1.2] Kernel panic - not syncing: Attempted to kill init!",
            "[   60.0] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
            "[   30.0] watchdog: BUG: soft lockup - CPU#1 stuck for 26s!",
            "BUG: kernel NULL pointer dereference, address: 0000000000000000",
            "INFO: task vm-init:1 blocked for more than 120 seconds.",
        ] {
            assert!(fatal(line).is_some(), "{line}");
        }
        for line in ["[    0.5] ACPI BIOS Error (bug): Could not resolve", "oom-kill: Out of memory: Killed process 5"]
        {
            assert_eq!(fatal(line), None, "{line}");
        }
    }
}
