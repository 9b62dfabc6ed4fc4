//! Where a recipe is run: stand-in devices, a `gpureap` in `PATH` that writes down how it ended, and programs that only
//! note that they were called.
use std::{
    cell::RefCell,
    env,
    fmt::Display,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    rc::Rc,
};

use gpureap_tests::harness::{Bench, Copy, Daemon, Device, Output, World, anybody, finish};

use crate::page::{Block, commands};

/// The name of an ordinary user, and its number.
pub(crate) const USER: (&str, u32) = ("nobody", 65534);

/// Held by next to nobody.
pub(crate) const FULL: &str = "/dev/full";
/// Can be mapped, so a holder of it can be one that uses it.
pub(crate) const ZERO: &str = "/dev/zero";

pub(crate) struct Stage<'a> {
    daemon: Option<Daemon<Rc<Bench>>>,
    pub(crate) bench: Rc<Bench>,
    block: &'a Block,
    environment: Vec<(&'a str, String)>,
    user: Option<u32>,
    /// Every call of gpureap so far.
    called: RefCell<Vec<String>>,
}

/// What a run of the block left.
#[derive(Debug)]
pub(crate) struct Played {
    pub(crate) output: Output,
    /// Exit code and arguments of each call of gpureap, in their order.
    pub(crate) calls: Vec<(i32, String)>,
}

impl<'a> Stage<'a> {
    /// The devices are GPU 0, GPU 1 and so on. The reason where they are somebody's.
    pub(crate) fn new(block: &'a Block, nodes: &[&str]) -> Result<Self, String> {
        let devices: Vec<Device> =
            nodes.iter().map(|node| if *node == ZERO { Device::zero() } else { Device::full() }).collect();
        let bench = Bench::new(&devices);
        for device in &devices {
            let others = anybody(&device.key());
            if !others.is_empty() {
                return Err(format!("{} is held by {others:?}, who might be killed", device.node));
            }
        }
        let stage = Self {
            daemon: None,
            bench: Rc::new(bench),
            block,
            environment: Vec::new(),
            user: None,
            called: RefCell::default(),
        };
        for place in ["", "bin"] {
            let path = stage.bench.path(place);
            fs::create_dir_all(&path).expect("a directory");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
        }
        fs::write(stage.calls(), "").expect("the list of calls");
        fs::set_permissions(stage.calls(), fs::Permissions::from_mode(0o666)).expect("chmod");
        let real = stage.bench.command(&[]).get_program().to_owned();
        stage.program(
            "gpureap",
            &format!(
                "'{}' \"$@\"\ncode=$?\necho \"$code $*\" >> '{}'\nexit $code",
                Path::new(&real).display(),
                stage.calls().display()
            ),
        );
        Ok(stage)
    }

    /// For recipes that need one.
    pub(crate) fn start_daemon(&mut self) {
        self.daemon = Some(Daemon::start(Rc::clone(&self.bench)));
    }

    fn calls(&self) -> PathBuf {
        self.bench.path("calls")
    }

    fn program(&self, name: &str, script: &str) {
        let path = self.bench.path("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("write a program");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
    }

    /// A program that only notes its arguments.
    pub(crate) fn stub(&self, name: &str) {
        self.program(name, &format!("echo \"$*\" >> '{}'", self.noted_at(name).display()));
    }

    fn noted_at(&self, name: &str) -> PathBuf {
        self.bench.path(&format!("noted-{name}"))
    }

    /// How a stub was called, one line each.
    pub(crate) fn noted(&self, name: &str) -> String {
        fs::read_to_string(self.noted_at(name)).unwrap_or_default()
    }

    /// Sets a variable of the block.
    pub(crate) fn set(&mut self, name: &'a str, value: impl Display) {
        self.environment.retain(|(known, _)| *known != name);
        self.environment.push((name, value.to_string()));
    }

    /// From now on it is run by an ordinary user. The reason where that one cannot reach gpureap.
    pub(crate) fn as_user(&mut self) -> Result<(), String> {
        let program = self.bench.command(&[]).get_program().to_owned();
        let mut trial = Command::new(&program);
        trial.arg("--version");
        World::default()
            .as_user(USER.1)
            .enter(trial)
            .output()
            .map_err(|error| format!("an ordinary user cannot reach {}: {error}", program.display()))?;
        self.user = Some(USER.1);
        Ok(())
    }

    /// A program of root's that a rule of that class names.
    pub(crate) fn classed(&self, name: &str, class: &str) -> Copy {
        let copy = Copy::guarded(name);
        let before = fs::read_to_string(self.bench.path("config.toml")).expect("the configuration");
        let exe = copy.path.display();
        self.bench.write_config(&format!(
            "{before}\n[[class]]\nname = \"test-{name}\"\nclass = \"{class}\"\nexe = \"{exe}\"\n"
        ));
        copy
    }

    /// Runs the block; each call of gpureap in it must have ended with the next of these codes, and the last word is that
    /// of the script.
    #[track_caller]
    pub(crate) fn play(&self, codes: &[i32], script: i32) -> Played {
        fs::write(self.calls(), "").expect("the list of calls");
        let mut command = self.bench.command(&[]);
        // The same surroundings, with a shell in place of gpureap.
        let surroundings: Vec<_> =
            command.get_envs().map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned))).collect();
        command = Command::new("sh");
        command.args(["-uc", &self.block.script]).current_dir("/").stdin(Stdio::null());
        for (name, value) in surroundings {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let path = env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.bench.path("bin").display()));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let command = match self.user {
            Some(user) => World::default().as_user(user).enter(command),
            None => command,
        };
        let output = finish(command);
        let text = fs::read_to_string(self.calls()).expect("the list of calls");
        let calls: Vec<(i32, String)> = text
            .lines()
            .map(|line| {
                let (code, rest) = line.split_once(' ').expect("a code and arguments");
                (code.parse().expect("a code"), rest.to_owned())
            })
            .collect();
        self.called.borrow_mut().extend(calls.iter().map(|(_, arguments)| arguments.clone()));
        let played = Played { output, calls };
        assert_eq!(played.calls.iter().map(|(code, _)| *code).collect::<Vec<_>>(), codes, "{played:#?}");
        assert_eq!(played.output.code, script, "{played:#?}");
        played
    }

    /// Panics if some call of gpureap in the block was never reached.
    #[track_caller]
    pub(crate) fn all_was_run(&self) {
        let called = self.called.borrow();
        let expected = commands(&self.block.script);
        assert!(!expected.is_empty(), "the block calls gpureap");
        for begin in expected {
            assert!(called.iter().any(|call| call.starts_with(&begin)), "`gpureap {begin}` in {called:?}");
        }
    }
}
