//! What is on the screen and what a key does to it. Pure: deeds are returned, not done.

use std::{collections::VecDeque, time::Duration};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::rows::{self, GpuRow, HolderRow, Memories, Sort};
use crate::{history::rows::Key, holders::report::HoldersReport, out::sanitize::escape};

/// Events that can be scrolled back to.
const EVENTS: usize = 500;
/// Between TERM and KILL.
pub(super) const GRACE: Duration = Duration::from_secs(10);
/// How long a fence from here lasts.
pub(super) const TTL: Duration = Duration::from_mins(10);

/// What is done to the host, once it is confirmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    /// With KILL at once, or after TERM and the usual time.
    Reap {
        who: Key,
        comm: String,
        now: bool,
    },
    Fence {
        node: String,
    },
    Unfence {
        node: String,
    },
}

impl Deed {
    /// What will be done, for the question.
    pub(super) fn question(&self) -> String {
        match self {
            Self::Reap { who, comm, now: false } => {
                format!("send TERM, and KILL after {} s, to {comm} (pid {})?", GRACE.as_secs(), who.pid)
            }
            Self::Reap { who, comm, now: true } => format!("send KILL to {comm} (pid {}) at once?", who.pid),
            Self::Fence { node } => format!("refuse new opens of {node}, host-wide, for {} min?", TTL.as_secs() / 60),
            Self::Unfence { node } => format!("let {node} be opened again?"),
        }
    }

    pub(super) fn doing(&self) -> String {
        match self {
            Self::Reap { who, comm, .. } => format!("ending {comm} (pid {}) …", who.pid),
            Self::Fence { node } => format!("fencing {node} …"),
            Self::Unfence { node } => format!("opening {node} again …"),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    Table,
    /// The filter is being typed; what it was before is kept.
    Filter {
        before: String,
    },
    Confirm(Deed),
    Help,
}

/// What the keys ask for beyond the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Quit,
    Do(Deed),
    /// Look now.
    Look,
}

#[derive(Debug, Default)]
pub(super) struct App {
    pub(super) report: Option<HoldersReport>,
    /// Why there is no newer report.
    pub(super) trouble: Option<String>,
    pub(super) memories: Memories,
    /// Why memory is not known.
    pub(super) memory_trouble: Option<String>,
    pub(super) events: VecDeque<String>,
    /// Why there are none.
    pub(super) events_trouble: Option<String>,
    /// Lines back from the newest.
    pub(super) back: usize,
    pub(super) sort: Sort,
    pub(super) reverse: bool,
    pub(super) filter: String,
    /// Only this GPU, by node.
    pub(super) node: Option<String>,
    pub(super) selected: Option<(Key, String)>,
    pub(super) mode: Mode,
    pub(super) paused: bool,
    /// What is being done.
    pub(super) doing: Option<Deed>,
    /// How the last deed went.
    pub(super) said: Option<String>,
    own: u32,
}

impl App {
    pub(super) fn new(own: u32) -> Self {
        Self { own, ..Self::default() }
    }

    pub(super) fn gpus(&self) -> Vec<GpuRow> {
        self.report.as_ref().map(|report| rows::gpus(report, &self.memories)).unwrap_or_default()
    }

    pub(super) fn holders(&self) -> Vec<HolderRow> {
        let all = self.report.as_ref().map(|report| rows::holders(report, &self.memories, self.own));
        rows::shown(all.unwrap_or_default(), self.node.as_deref(), &self.filter, self.sort, self.reverse)
    }

    /// The place of what is selected: a process keeps it wherever it moves, and who is gone leaves it to the next.
    pub(super) fn position(&self, rows: &[HolderRow]) -> Option<usize> {
        let (who, node) = self.selected.as_ref()?;
        rows.iter().position(|row| row.who == *who && row.node == *node)
    }

    pub(super) fn show(&mut self, report: Result<HoldersReport, String>) {
        match report {
            _ if self.paused => {}
            Ok(report) => {
                let before = self.holders();
                let place = self.position(&before);
                self.report = Some(report);
                self.trouble = None;
                if let Some(place) = place {
                    let now = self.holders();
                    if self.position(&now).is_none() {
                        self.select(&now, place);
                    }
                }
            }
            Err(trouble) => self.trouble = Some(trouble),
        }
    }

    pub(super) fn event(&mut self, line: String) {
        self.events.push_back(line);
        if self.back > 0 {
            // What is looked at stays where it is.
            self.back = (self.back + 1).min(EVENTS - 1);
        }
        if self.events.len() > EVENTS {
            self.events.pop_front();
        }
    }

    pub(super) fn done(&mut self, said: String) {
        self.doing = None;
        self.said = Some(said);
    }

    fn select(&mut self, rows: &[HolderRow], place: usize) {
        self.selected = rows.get(place.min(rows.len().saturating_sub(1))).map(|row| (row.who, row.node.clone()));
    }

    fn move_by(&mut self, by: isize) {
        let rows = self.holders();
        let place = match self.position(&rows) {
            None => 0,
            Some(place) => place.saturating_add_signed(by),
        };
        self.select(&rows, place);
    }

    /// All GPUs, then one after the other.
    fn next_gpu(&mut self) {
        let gpus = self.gpus();
        let next = match &self.node {
            None => 0,
            Some(node) => gpus.iter().position(|gpu| gpu.node == *node).map_or(0, |place| place + 1),
        };
        self.node = gpus.get(next).map(|gpu| gpu.node.clone());
    }

    /// The GPU that is chosen, or the one of the selected row.
    fn gpu_in_hand(&self) -> Result<GpuRow, String> {
        let gpus = self.gpus();
        let selected = self.selected.as_ref().map(|(_, node)| node);
        let node = self.node.as_ref().or(selected);
        let only = (gpus.len() == 1).then(|| gpus[0].clone());
        gpus.into_iter()
            .find(|gpu| Some(&gpu.node) == node)
            .or(only)
            .ok_or_else(|| "choose a GPU first, with g or by a row".to_owned())
    }

    fn ask(&mut self, deed: Result<Deed, String>) {
        match deed {
            Ok(_) if self.doing.is_some() => self.said = Some("one thing after the other".to_owned()),
            Ok(deed) => self.mode = Mode::Confirm(deed),
            Err(said) => self.said = Some(said),
        }
    }

    fn reap(&self, now: bool) -> Result<Deed, String> {
        let rows = self.holders();
        let place = self.position(&rows).ok_or_else(|| "select a process first, with the arrows".to_owned())?;
        let HolderRow { who, comm, .. } = &rows[place];
        Ok(Deed::Reap { who: *who, comm: escape(comm).into_owned(), now })
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Option<Wish> {
        let KeyEvent { code, modifiers, kind, state: _ } = key;
        if kind == KeyEventKind::Release {
            return None;
        }
        if modifiers.contains(KeyModifiers::CONTROL) {
            return match code {
                KeyCode::Char('c') => Some(Wish::Quit),
                // The terminal has been garbled by somebody else.
                KeyCode::Char('l') => Some(Wish::Look),
                _ => None,
            };
        }
        match std::mem::take(&mut self.mode) {
            Mode::Table => self.table_key(code),
            Mode::Help => None,
            Mode::Confirm(deed) => {
                // Everything but a yes is a no.
                if !matches!(code, KeyCode::Char('y' | 'Y')) {
                    self.said = Some("nothing was done".to_owned());
                    return None;
                }
                self.said = None;
                self.doing = Some(deed.clone());
                Some(Wish::Do(deed))
            }
            Mode::Filter { before } => {
                match code {
                    KeyCode::Enter => {}
                    KeyCode::Esc => self.filter = before,
                    _ => {
                        match code {
                            KeyCode::Backspace => drop(self.filter.pop()),
                            KeyCode::Char(typed) => self.filter.push(typed),
                            _ => {}
                        }
                        self.mode = Mode::Filter { before };
                    }
                }
                None
            }
        }
    }

    fn table_key(&mut self, code: KeyCode) -> Option<Wish> {
        self.said = None;
        match code {
            KeyCode::Char('q') => return Some(Wish::Quit),
            KeyCode::Char(' ') => {
                self.paused = !self.paused;
                return (!self.paused).then_some(Wish::Look);
            }
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.mode = Mode::Help,
            KeyCode::Up => self.move_by(-1),
            KeyCode::Down => self.move_by(1),
            KeyCode::PageUp => self.move_by(-10),
            KeyCode::PageDown => self.move_by(10),
            KeyCode::Home => self.move_by(isize::MIN),
            KeyCode::End => self.move_by(isize::MAX),
            KeyCode::Esc => {
                self.selected = None;
                self.back = 0;
            }
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('/') => self.mode = Mode::Filter { before: self.filter.clone() },
            KeyCode::Char('g') => self.next_gpu(),
            KeyCode::Char('[') => self.back = (self.back + 1).min(self.events.len().saturating_sub(1)),
            KeyCode::Char(']') => self.back = self.back.saturating_sub(1),
            KeyCode::Char('k') => self.ask(self.reap(false)),
            KeyCode::Char('K') => self.ask(self.reap(true)),
            KeyCode::Char('f') => {
                let deed = self.gpu_in_hand().map(
                    |GpuRow { node, fenced, .. }| {
                        if fenced { Deed::Unfence { node } } else { Deed::Fence { node } }
                    },
                );
                self.ask(deed);
            }
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::tests::{memories, report};

    fn app() -> App {
        let mut app = App::new(1);
        app.memories = memories();
        app.show(Ok(report()));
        app
    }

    fn press(app: &mut App, keys: &str) -> Option<Wish> {
        keys.chars()
            .map(|typed| match typed {
                '↑' => KeyCode::Up,
                '↓' => KeyCode::Down,
                '⇱' => KeyCode::Home,
                '⇲' => KeyCode::End,
                '⏎' => KeyCode::Enter,
                '⎋' => KeyCode::Esc,
                '⌫' => KeyCode::Backspace,
                typed => KeyCode::Char(typed),
            })
            .map(|code| app.key(KeyEvent::new(code, KeyModifiers::NONE)))
            .last()
            .flatten()
    }

    fn selected(app: &App) -> Option<(u32, &str)> {
        app.selected.as_ref().map(|(who, node)| (who.pid, node.as_str()))
    }

    #[test]
    fn arrows_move_within_the_rows() {
        let mut app = app();
        for (keys, expected) in [
            ("↓", (4711, "/dev/nvidia0")),
            ("↓", (4711, "/dev/nvidia1")),
            ("↑↑↑", (4711, "/dev/nvidia0")),
            ("⇲", (900, "/dev/nvidiactl")),
            ("↓", (900, "/dev/nvidiactl")),
            ("⇱", (4711, "/dev/nvidia0")),
        ] {
            press(&mut app, keys);
            assert_eq!(selected(&app), Some(expected), "{keys}");
        }
        press(&mut app, "⎋");
        assert_eq!(selected(&app), None);
    }

    #[test]
    fn who_is_selected_stays_so_and_a_gap_is_filled() {
        let mut app = app();
        press(&mut app, "↓↓↓s");
        assert_eq!((selected(&app), app.sort), (Some((4800, "/dev/nvidia1")), Sort::Memory));
        press(&mut app, "sssss");
        let mut without = report();
        without.holders.retain(|holder| holder.pid != 4800);
        app.show(Ok(without));
        assert_eq!(selected(&app), Some((900, "/dev/nvidiactl")), "who is at its place now");
        // The same pid, another process.
        let mut another = report();
        for holder in &mut another.holders {
            holder.start_ns += 1;
        }
        app.show(Ok(another));
        assert_ne!(app.selected.as_ref().map(|(who, _)| who.start_ns), Some(9), "a pid that came back is another one");
    }

    #[test]
    fn only_a_yes_kills() {
        let mut app = app();
        let who = Key { pid: 4711, start_ns: 47 };
        for (keys, now) in [("↓k", false), ("K", true)] {
            assert_eq!(press(&mut app, keys), None);
            let deed = Deed::Reap { who, comm: "python3".to_owned(), now };
            assert_eq!(app.mode, Mode::Confirm(deed.clone()));
            assert_eq!(press(&mut app, "n"), None);
            assert_eq!((&app.mode, app.said.as_deref()), (&Mode::Table, Some("nothing was done")));
            assert_eq!(press(&mut app, if now { "K⏎" } else { "k⏎" }), None);
            assert_eq!(press(&mut app, if now { "Ky" } else { "ky" }), Some(Wish::Do(deed)));
            assert_eq!(press(&mut app, "k"), None, "one after the other");
            assert_eq!(app.mode, Mode::Table);
            app.done("freed".to_owned());
        }
    }

    #[test]
    fn nothing_selected_is_nobody_killed() {
        let mut app = app();
        assert_eq!(press(&mut app, "k"), None);
        assert_eq!((&app.mode, app.said.as_deref()), (&Mode::Table, Some("select a process first, with the arrows")));
    }

    #[test]
    fn the_fence_is_of_the_gpu_in_hand() {
        let mut app = app();
        press(&mut app, "f");
        assert_eq!(app.said.as_deref(), Some("choose a GPU first, with g or by a row"));
        press(&mut app, "gf");
        assert_eq!(app.mode, Mode::Confirm(Deed::Fence { node: "/dev/nvidia0".to_owned() }));
        // That one is fenced.
        assert_eq!(press(&mut app, "ngfy"), Some(Wish::Do(Deed::Unfence { node: "/dev/nvidia1".to_owned() })));
        app.done(String::new());
        press(&mut app, "g↓f");
        assert_eq!(app.mode, Mode::Confirm(Deed::Fence { node: "/dev/nvidia0".to_owned() }), "of the selected row");
    }

    #[test]
    fn a_filter_is_typed_and_taken_back() {
        let mut app = app();
        press(&mut app, "/bobx⌫");
        assert_eq!((app.filter.as_str(), app.holders().len()), ("bob", 1));
        press(&mut app, "q⎋");
        assert_eq!((app.filter.as_str(), &app.mode), ("", &Mode::Table));
        press(&mut app, "/ali⏎/q⎋");
        assert_eq!(app.filter, "ali");
    }

    #[test]
    fn paused_shows_nothing_new() {
        let mut app = app();
        assert_eq!(press(&mut app, " "), None);
        let empty = HoldersReport { holders: Vec::new(), ..report() };
        app.show(Ok(empty));
        assert_eq!(app.holders().len(), 4);
        assert_eq!(press(&mut app, " "), Some(Wish::Look));
    }

    #[test]
    fn events_are_bounded_and_what_is_read_stays() {
        let mut app = app();
        for number in 0..600 {
            app.event(number.to_string());
        }
        assert_eq!((app.events.len(), app.events[0].as_str()), (500, "100"));
        press(&mut app, "[[");
        let read = |app: &App| app.events[app.events.len() - 1 - app.back].clone();
        assert_eq!(read(&app), "597");
        app.event("600".to_owned());
        assert_eq!(read(&app), "597");
        press(&mut app, "]]]]");
        assert_eq!(app.back, 0);
    }

    #[test]
    fn quits() {
        assert_eq!(press(&mut app(), "q"), Some(Wish::Quit));
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        let mut app = app();
        press(&mut app, "/");
        assert_eq!(app.key(control_c), Some(Wish::Quit));
    }
}
