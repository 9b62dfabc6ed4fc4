//! `gpureap top`: GPUs, who holds them and what happens, live, and the means to end it.

mod app;
mod draw;
mod rows;
mod source;

use std::{
    io::{self, IsTerminal as _},
    sync::mpsc::{self, Sender, SyncSender},
};

use ratatui::{DefaultTerminal, crossterm::event};

use self::{
    app::{App, Wish},
    draw::Palette,
    source::Message,
};
use crate::{
    cli::{Global, HoldersArgs, TopArgs},
    config::Config,
    error::Failure,
    exit_code::Exit,
    model::DeviceKind,
    out::Style,
};

/// What waits to be shown. A screen that is not read, as over a slow line, holds up whoever fills it.
const WAITING: usize = 64;

pub fn run(args: &TopArgs, global: &Global, config: &Config) -> anyhow::Result<Exit> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Failure::usage(
            "top needs a terminal; `gpureap holders` prints once, `gpureap events --follow` goes on",
        )
        .into());
    }
    let TopArgs { choosing, interval } = args;
    let holders = HoldersArgs { choosing: choosing.clone(), ..HoldersArgs::default() };
    // A wrong choice is said before the screen is taken, and whoever may see nothing is told so by the command's exit code.
    let first = crate::commands::holders::report(&holders, config)?;
    let has_gpu = first.devices.iter().any(|device| device.kind == DeviceKind::Gpu);
    let mut app = App::new(std::process::id());
    app.show(Ok(first));

    let (out, messages) = mpsc::sync_channel(WAITING);
    let (look, asks) = mpsc::channel();
    source::looks(config.clone(), holders, *interval, asks, out.clone())?;
    source::events(config, out.clone())?;
    if has_gpu {
        source::memory(config.nvml.clone(), out.clone())?;
    }
    let palette = Palette { colours: Style::of_stdout().colours };
    let mut screen = Screen { app, palette, config, global, look, out };
    // It puts the terminal back also when this panics.
    let terminal = ratatui::try_init()?;
    let watched = source::signals(screen.out.clone()).and_then(|()| source::terminal(screen.out.clone()));
    let ended = watched.map_err(Into::into).and_then(|()| screen.serve(terminal, &messages));
    ratatui::try_restore()?;
    ended?;
    Ok(Exit::Done)
}

struct Screen<'a> {
    app: App,
    palette: Palette,
    config: &'a Config,
    global: &'a Global,
    look: Sender<()>,
    out: SyncSender<Message>,
}

impl Screen<'_> {
    fn serve(&mut self, mut terminal: DefaultTerminal, messages: &mpsc::Receiver<Message>) -> anyhow::Result<()> {
        loop {
            terminal.draw(|frame| draw::draw(frame, &self.app, self.palette))?;
            // All that has come is shown at once: a burst of events is one picture.
            let first = messages.recv()?;
            for message in std::iter::once(first).chain(messages.try_iter().take(WAITING)) {
                match message {
                    Message::Closed => return Ok(()),
                    Message::Terminal(event::Event::Resize(..)) => terminal.autoresize()?,
                    Message::Terminal(event::Event::Key(key)) => match self.app.key(key) {
                        Some(Wish::Quit) => return Ok(()),
                        Some(Wish::Look) => {
                            terminal.clear()?;
                            self.look.send(())?;
                        }
                        Some(Wish::Do(deed)) => {
                            source::deed(self.config, &self.global.words(), deed, self.look.clone(), self.out.clone())?;
                        }
                        None => {}
                    },
                    Message::Terminal(_) => {}
                    Message::Report(report) => self.app.show(*report),
                    Message::Memory(Ok(memories)) => {
                        self.app.memories = memories;
                        self.app.memory_trouble = None;
                    }
                    Message::Memory(Err(trouble)) => self.app.memory_trouble = Some(trouble),
                    Message::Event(line) => self.app.event(line),
                    Message::Events(told) => self.app.events_trouble = told.err(),
                    Message::Done(said) => self.app.done(said),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::rows::Memories;
    use crate::{
        classify::Class,
        gpu::nvml::{Context, Gpu, GpuProcess, Memory, Snapshot},
        holders::report::{DeviceReport, HeldReport, HolderReport, HoldersReport, Origin, Role, SCHEMA},
        model::{Backend, DeviceKind, How, Source},
    };

    fn device(node: &str, minor: u32, kind: DeviceKind, gpu: Option<u32>, holders: u32, files: u32) -> DeviceReport {
        DeviceReport {
            node: node.to_owned(),
            major: 195,
            minor: Some(minor),
            kind,
            gpu,
            index: None,
            uuid: None,
            bdf: None,
            model: (gpu == Some(0)).then(|| "NVIDIA H200".to_owned()),
            fenced: gpu == Some(1),
            open_files: Some(files),
            holders,
        }
    }

    fn held(node: &str, fds: u32, maps: u32, role: Option<Role>, first_open: &str) -> HeldReport {
        let first = Some(first_open.parse().unwrap());
        HeldReport { node: node.to_owned(), fds, maps, role, inherited_from: None, first_open: first, last_open: first }
    }

    fn holder(pid: u32, user: &str, argv: &[&str], devices: Vec<HeldReport>) -> HolderReport {
        let argv: Vec<String> = argv.iter().map(|word| (*word).to_owned()).collect();
        HolderReport {
            start_ns: u64::from(pid / 100),
            comm: argv[0].rsplit('/').next().unwrap().to_owned(),
            argv,
            user: Some(user.to_owned()),
            parent: Some(crate::holders::report::ProcessName { pid: 4000, start_ns: None, comm: "bash".to_owned() }),
            how: BTreeSet::from([How::Fd]),
            ..HolderReport::sample(pid, devices)
        }
    }

    /// A job on GPU 0 with handles on GPU 1, a stuck one on GPU 1, which is fenced, and a monitor.
    pub(super) fn report() -> HoldersReport {
        let hour_ago = "2026-12-01T11:00:05Z";
        let train = HolderReport {
            slurm_job: Some("77".to_owned()),
            ..holder(
                4711,
                "alice",
                &["python3", "train.py"],
                vec![
                    held("/dev/nvidia0", 23, 3, Some(Role::Attached), hour_ago),
                    held("/dev/nvidia1", 3, 0, Some(Role::Handle), hour_ago),
                    held("/dev/nvidiactl", 4, 0, None, hour_ago),
                ],
            )
        };
        let sim = HolderReport {
            state: Some('D'),
            container: Some("c0ffee".to_owned()),
            parent: None,
            ..holder(
                4800,
                "bob",
                &["./sim"],
                vec![held("/dev/nvidia1", 2, 2, Some(Role::Attached), "2026-12-01T12:00:00Z")],
            )
        };
        let monitor = HolderReport {
            class: Class::Monitor,
            origin: Origin::Snapshot,
            parent: None,
            ..holder(900, "root", &["dcgm-exporter"], vec![held("/dev/nvidiactl", 1, 0, None, "2026-11-29T12:00:00Z")])
        };
        HoldersReport {
            schema: SCHEMA.to_owned(),
            host: "node7".to_owned(),
            boot_id: "b".to_owned(),
            time: "2026-12-01T12:00:05Z".parse().unwrap(),
            source: Source::Map,
            backend: Some(Backend::Kprobe),
            complete: true,
            cannot_see: BTreeSet::new(),
            swept: None,
            devices: vec![
                device("/dev/nvidia0", 0, DeviceKind::Gpu, Some(0), 1, 23),
                device("/dev/nvidia1", 1, DeviceKind::Gpu, Some(1), 2, 5),
                device("/dev/nvidiactl", 255, DeviceKind::Ctl, None, 2, 5),
            ],
            holders: vec![monitor, train, sim],
            orphans: Vec::new(),
            lost_events: 0,
            notes: Vec::new(),
        }
    }

    /// Of GPU 0 alone.
    pub(super) fn memories() -> Memories {
        let process = |context| GpuProcess { pid: 4711, used: Some(40 << 30), context, gi: None, ci: None };
        let gpu = Gpu {
            minor: Some(0),
            memory: Some(Memory { total: 80 << 30, used: 41 << 30, reserved: None }),
            processes: Some(vec![process(Context::Compute), process(Context::Graphics)]),
            ..Gpu::default()
        };
        Memories::new(&Snapshot { driver: None, gpus: vec![gpu, Gpu { minor: Some(1), ..Gpu::default() }] })
    }
}
