//! A screen that a program draws on, as tmux shows it.
use std::{
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use tempfile::TempDir;

use super::{PATIENCE, Pid};

/// A tmux server of its own, with one window. It ends with this.
pub struct Tmux {
    place: TempDir,
}

impl Tmux {
    /// Runs a command in a window of that size; its environment goes with it.
    pub fn start(command: &Command, columns: u16, lines: u16) -> Self {
        let tmux = Self { place: tempfile::Builder::new().prefix("gpureap-tmux-").tempdir().expect("a directory") };
        let (columns, lines) = (columns.to_string(), lines.to_string());
        let mut start = tmux.command();
        start.args(["-f", "/dev/null", "new-session", "-d", "-x", &columns, "-y", &lines]);
        for (name, value) in command.get_envs() {
            let mut assignment = name.to_os_string();
            assignment.push("=");
            assignment.push(value.unwrap_or_default());
            start.arg("-e").arg(assignment);
        }
        // What it left is read after its end.
        let status = start
            .args(["sh", "-c", "\"$@\"; echo \"it ended with $?\"; exec sleep 600", "sh"])
            .arg(command.get_program())
            .args(command.get_args())
            .status();
        assert!(status.expect("start tmux").success(), "tmux starts");
        tmux
    }

    fn command(&self) -> Command {
        let mut command = Command::new("tmux");
        let socket: PathBuf = self.place.path().join("socket");
        command.arg("-S").arg(socket).env("LC_ALL", "C.UTF-8").env("TERM", "xterm-256color").stdin(Stdio::null());
        command
    }

    /// The lines of the screen.
    pub fn capture(&self) -> Vec<String> {
        let output = self.command().args(["capture-pane", "-p"]).output().expect("capture the screen");
        String::from_utf8(output.stdout).expect("UTF-8").lines().map(|line| line.trim_end().to_owned()).collect()
    }

    /// As tmux names them: `q`, `Down`, `C-c`.
    pub fn keys(&self, keys: &[&str]) {
        let status = self.command().arg("send-keys").args(keys).status();
        assert!(status.expect("send keys").success(), "tmux takes the keys {keys:?}");
    }

    /// The program in the window.
    pub fn program(&self) -> Pid {
        let output = self.command().args(["list-panes", "-F", "#{pane_pid}"]).output().expect("ask for the pane");
        let shell = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).expect("its children");
        children.split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("one child")
    }

    /// Whether the window shows the other screen, that programs take and give back.
    pub fn is_taken(&self) -> bool {
        let output = self.command().args(["display", "-p", "#{alternate_on}"]).output().expect("ask for the screen");
        String::from_utf8_lossy(&output.stdout).trim() == "1"
    }

    pub fn resize(&self, columns: u16, lines: u16) {
        let (columns, lines) = (columns.to_string(), lines.to_string());
        let status = self.command().args(["resize-window", "-x", &columns, "-y", &lines]).status();
        assert!(status.expect("resize").success(), "tmux takes the size");
    }

    /// Waits until the screen is as wanted, and returns it.
    #[track_caller]
    pub fn expect(&self, what: &str, fits: impl Fn(&[String]) -> bool) -> Vec<String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let screen = self.capture();
            if fits(&screen) {
                return screen;
            }
            assert!(Instant::now() < until, "{what}; the screen is:\n{}", screen.join("\n"));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until some line has this.
    #[track_caller]
    pub fn expect_text(&self, text: &str) -> Vec<String> {
        self.expect(&format!("{text:?} is not shown"), |screen| screen.iter().any(|line| line.contains(text)))
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.command().arg("kill-server").stderr(Stdio::null()).status().ok();
    }
}
