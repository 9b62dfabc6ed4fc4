//! The screen. It must say all that matters in 80 columns and 24 lines.

use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Row, Table, TableState},
};

use super::{
    app::{App, Mode},
    rows::{GpuRow, HolderRow},
};
use crate::{
    classify::Class,
    error::NO_DEVICE,
    holders::report::{HoldersReport, Role},
    out::{
        sanitize::escape,
        words::{plural, span, word},
    },
};

/// Columns of a bar between its brackets.
const BAR: usize = 20;

/// Whether colours may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Palette {
    pub(super) colours: bool,
}

impl Palette {
    fn paint(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    /// Marked without a colour too.
    fn alarm(self) -> Style {
        self.paint(Color::Red).add_modifier(Modifier::BOLD)
    }

    const fn title() -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    const fn dim() -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }
}

pub(super) fn draw(frame: &mut Frame<'_>, app: &App, palette: Palette) {
    let gpus = app.gpus();
    let area = frame.area();
    // The holders are what is looked for: the others leave them at least half.
    let most = usize::from(area.height / 3).max(2);
    let gpu_lines = gpus.len().clamp(1, most) as u16;
    let event_lines = if area.height >= 20 { (area.height / 5).max(3) } else { 0 };
    let [head, gpu_area, table, event_area, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(gpu_lines),
        Constraint::Min(3),
        Constraint::Length(event_lines),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(header(app)).style(Palette::title()), head);
    frame.render_widget(Paragraph::new(gpu_block(&gpus, app, usize::from(gpu_lines), palette)), gpu_area);
    holders(frame, table, app, palette);
    if event_lines > 0 {
        frame.render_widget(Paragraph::new(events(app, usize::from(event_lines))), event_area);
    }
    frame.render_widget(Paragraph::new(footer(app, palette)), foot);
    if app.mode == Mode::Help {
        help(frame, area);
    }
}

fn header(app: &App) -> String {
    let Some(HoldersReport { host, time, source, backend, complete, lost_events, .. }) = &app.report else {
        return " gpureap".to_owned();
    };
    let mut parts = vec![format!(" gpureap  {}  {}", escape(host), time.strftime("%H:%M:%SZ"))];
    parts.push(word(source));
    parts.extend(backend.as_ref().map(word));
    if *lost_events > 0 {
        parts.push(format!("lost events {lost_events}"));
    }
    if !complete {
        parts.push("incomplete".to_owned());
    }
    if app.paused {
        parts.push("PAUSED".to_owned());
    }
    parts.join("  ")
}

fn gpu_block(gpus: &[GpuRow], app: &App, lines: usize, palette: Palette) -> Vec<Line<'static>> {
    let mut text: Vec<Line<'static>> = gpus.iter().map(|gpu| gpu_line(gpu, app, palette)).collect();
    if text.is_empty() {
        let trouble = app.trouble.as_deref().map(|trouble| escape(trouble).into_owned());
        let nothing = match (&app.report, trouble) {
            (_, Some(trouble)) => trouble,
            (Some(_), None) => NO_DEVICE.to_owned(),
            (None, None) => "looking …".to_owned(),
        };
        text.push(Line::styled(format!(" {nothing}"), palette.alarm()));
    }
    if text.len() > lines {
        let left = text.len() + 1 - lines;
        text.truncate(lines - 1);
        text.push(Line::styled(format!(" … and {left} more GPUs"), Palette::dim()));
    }
    text
}

fn gpu_line(gpu: &GpuRow, app: &App, palette: Palette) -> Line<'static> {
    let GpuRow { number, node, model, holders, open_files, fenced, stand_in, memory } = gpu;
    let name = number.map_or_else(|| escape(node).into_owned(), |number| format!("GPU {number}"));
    let chosen = app.node.as_ref() == Some(node);
    let mut spans = vec![Span::styled(
        format!("{}{name:<6} ", if chosen { ">" } else { " " }),
        if chosen { Style::new().add_modifier(Modifier::BOLD) } else { Style::new() },
    )];
    match memory {
        Some((used, total)) => {
            let colour = match used * 10 / (*total).max(1) {
                0..5 => Color::Green,
                5..9 => Color::Yellow,
                _ => Color::Red,
            };
            spans.push(Span::styled(bar(*used, *total), palette.paint(colour)));
            spans.push(Span::raw(format!(" {} of {}", gib(*used), gib(*total))));
        }
        None if *stand_in => spans.push(Span::raw(escape(node).into_owned())),
        None => {
            spans.push(Span::styled(format!("[{:^BAR$}]", "memory not known"), Palette::dim()));
            let trouble = app.memory_trouble.as_deref().map(|trouble| format!(" ({})", escape(trouble)));
            spans.push(Span::styled(trouble.unwrap_or_default(), Palette::dim()));
        }
    }
    let files = open_files.map(|files| format!(", {files} {}", plural(files as usize, "file", "files")));
    spans.push(Span::raw(format!(
        "  {holders} {}{}",
        plural(*holders as usize, "holder", "holders"),
        files.unwrap_or_default()
    )));
    if *fenced {
        spans.push(Span::styled("  FENCED", palette.alarm()));
    }
    if let Some(model) = model {
        spans.push(Span::styled(format!("  {}", escape(model)), Palette::dim()));
    }
    Line::from(spans)
}

/// `[||||||    ]`: told by its length, whatever the colours.
fn bar(used: u64, total: u64) -> String {
    // A little is something.
    let full = (used.saturating_mul(BAR as u64).div_ceil(total.max(1)) as usize).min(BAR);
    format!("[{}{}]", "|".repeat(full), " ".repeat(BAR - full))
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

fn short_bytes(bytes: u64) -> String {
    match bytes {
        0..1_073_741_824 => format!("{}M", bytes >> 20),
        _ => format!("{:.1}G", bytes as f64 / f64::from(1 << 30)),
    }
}

/// Titles with their widths. These suffice for nearly all: what jumps with each look cannot be read.
const COLUMNS: [(&str, Constraint); 10] = [
    ("GPU", Constraint::Length(5)),
    ("PID", Constraint::Length(7)),
    ("USER", Constraint::Length(8)),
    ("CLASS", Constraint::Length(7)),
    ("S", Constraint::Length(1)),
    ("ROLE", Constraint::Length(8)),
    ("FILES", Constraint::Length(5)),
    ("MEM", Constraint::Length(6)),
    ("HELD", Constraint::Length(7)),
    ("COMMAND", Constraint::Min(10)),
];
/// Left out where all are jobs.
const CLASS: usize = 3;

fn holders(frame: &mut Frame<'_>, area: Rect, app: &App, palette: Palette) {
    let rows = app.holders();
    let classes = rows.iter().any(|row| row.class != Class::Job);
    let columns = COLUMNS.iter().enumerate().filter(|(column, _)| classes || *column != CLASS);
    let (titles, widths): (Vec<&str>, Vec<Constraint>) = columns.map(|(_, column)| *column).unzip();
    let title = Row::new(titles).style(Palette::title());
    let lines = rows.iter().map(|row| holder_row(row, classes, palette));
    let table = Table::new(lines, widths)
        .header(title)
        .column_spacing(1)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(app.position(&rows));
    frame.render_stateful_widget(table, area, &mut state);
    if rows.is_empty() && area.height > 1 {
        let words = match &app.report {
            None => "",
            Some(_) if !app.filter.is_empty() || app.node.is_some() => "nobody who fits the filter holds a GPU",
            Some(report) if report.complete => "nobody holds a GPU",
            Some(_) => "nobody who was seen holds a GPU",
        };
        let below = Rect { y: area.y + 1, height: 1, ..area };
        frame.render_widget(Paragraph::new(format!(" {words}")).style(Palette::dim()), below);
    }
}

fn holder_row(row: &HolderRow, classes: bool, palette: Palette) -> Row<'static> {
    let HolderRow { who, gpu, user, class, state, role, fds, maps, memory, held, command, place, .. } = row;
    let unknown = || "-".to_owned();
    let held = held.map_or_else(unknown, |(held, longer)| format!("{}{}", if longer { ">" } else { "" }, span(held)));
    let command = match place {
        Some(place) => format!("{command}  ({})", escape(place)),
        None => command.clone(),
    };
    let style = match (state, role, class) {
        (Some('D' | 'Z'), ..) => palette.alarm(),
        (.., Class::System | Class::Monitor) => Palette::dim(),
        (_, Some(Role::Attached), _) => palette.paint(Color::Yellow),
        _ => Style::new(),
    };
    let cells = [
        escape(gpu).into_owned(),
        who.pid.to_string(),
        user.clone(),
        class.name().to_owned(),
        state.map_or_else(|| "?".to_owned(), |state| state.to_string()),
        role.map_or_else(unknown, |role| word(&role)),
        format!("{fds}+{maps}"),
        memory.map_or_else(unknown, short_bytes),
        held,
        command,
    ];
    let shown = cells.into_iter().enumerate().filter(|(column, _)| classes || *column != CLASS);
    Row::new(shown.map(|(_, cell)| cell)).style(style)
}

fn events(app: &App, lines: usize) -> Vec<Line<'static>> {
    let back = if app.back > 0 { format!("  {} back, ] goes on", app.back) } else { String::new() };
    let trouble = app.events_trouble.as_deref().map(|trouble| format!("  ({})", escape(trouble))).unwrap_or_default();
    let title = format!(" EVENTS{back}{trouble}");
    let mut text = vec![Line::styled(title, Style::new().add_modifier(Modifier::BOLD))];
    let end = app.events.len() - app.back.min(app.events.len());
    let room = lines - 1;
    text.extend(app.events.range(end.saturating_sub(room)..end).map(|line| Line::raw(format!(" {line}"))));
    text
}

fn footer(app: &App, palette: Palette) -> Line<'static> {
    match &app.mode {
        Mode::Confirm(deed) => Line::styled(format!(" {} y/N", deed.question()), palette.alarm()),
        Mode::Filter { .. } => {
            Line::raw(format!(" filter: {}_   Enter keeps it, Esc takes it back", escape(&app.filter)))
        }
        Mode::Table | Mode::Help => {
            if let Some(deed) = &app.doing {
                return Line::styled(format!(" {}", deed.doing()), palette.alarm());
            }
            if let Some(said) = &app.said {
                return Line::styled(format!(" {}", escape(said)), Style::new().add_modifier(Modifier::BOLD));
            }
            if let (Some(trouble), true) = (&app.trouble, app.report.is_some()) {
                return Line::styled(format!(" not up to date: {}", escape(trouble)), palette.alarm());
            }
            let order = format!("{}{}", app.sort.name(), if app.reverse { ", reversed" } else { "" });
            let filter = if app.filter.is_empty() { String::new() } else { format!("  [{}]", escape(&app.filter)) };
            Line::raw(format!(" q quit  ↑↓ select  k kill  f fence  g GPU  s sort: {order}  / filter{filter}  ? help"))
        }
    }
}

const HELP: &str = " ↑ ↓ PgUp PgDn Home End   select a process         Esc  select none
 k   TERM, and KILL some time later  K   KILL at once
 f   fence the row's GPU, or open it again    g    one GPU after the other
 s   sort by the next column        r   reverse the order
 /   filter: words that must all be there
 [ ] scroll the events              space  pause   Ctrl-L  draw anew
 q   quit

 k, K and f ask first. What is killed is reaped as by `gpureap reap --pid`.
 FILES: descriptors + mappings. HELD >: it began before gpureap saw it.
 ROLE: attached uses the GPU, handle has it open and no more.";

fn help(frame: &mut Frame<'_>, area: Rect) {
    let lines: Vec<Line<'_>> = HELP.lines().map(Line::raw).collect();
    let (width, height) = (78.min(area.width), (lines.len() as u16 + 2).min(area.height));
    let place = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, place);
    let block = Block::bordered().title(" keys ").title_alignment(Alignment::Center);
    frame.render_widget(Paragraph::new(lines).block(block), place);
}

#[cfg(test)]
mod tests {
    use ratatui::{
        Terminal,
        backend::TestBackend,
        crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    };

    use super::*;
    use crate::top::tests::{memories, report};

    fn app() -> App {
        let mut app = App::new(1);
        app.memories = memories();
        app.show(Ok(report()));
        app.event("12:00:01  open   4711 python3 opens /dev/nvidia0".to_owned());
        app
    }

    fn screen(app: &App, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, app, Palette { colours: false })).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect()
    }

    fn press(app: &mut App, code: KeyCode) {
        app.key(KeyEvent::new(code, KeyModifiers::NONE));
    }

    #[test]
    fn eighty_by_twenty_four() {
        let expected = [
            " gpureap  node7  12:00:05Z  map  kprobe",
            " GPU 0  [|||||||||||         ] 41.0 GiB of 80.0 GiB  1 holder, 23 files  NVIDIA",
            " GPU 1  [  memory not known  ]  2 holders, 5 files  FENCED",
            "GPU   PID     USER     CLASS   S ROLE     FILES MEM    HELD    COMMAND",
            "0     4711    alice    job     S attached 23+3  40.0G  1h 0m   python3 train.py",
            "1     4711    alice    job     S handle   3+0   -      1h 0m   python3 train.py",
            "1     4800    bob      job     D attached 2+2   -      5s      sim  (c0ffee)",
            "-     900     root     monitor S -        1+0   -      >2d 0h  dcgm-exporter",
        ];
        let screen = screen(&app(), 80, 24);
        assert_eq!(screen[..expected.len()], expected);
        assert_eq!(screen[19..21], [" EVENTS", " 12:00:01  open   4711 python3 opens /dev/nvidia0"]);
        assert_eq!(screen[23], " q quit  ↑↓ select  k kill  f fence  g GPU  s sort: GPU  / filter  ? help");
    }

    #[test]
    fn a_small_and_an_empty_screen() {
        for (width, height) in [(80, 10), (40, 8), (20, 5), (1, 1), (200, 60)] {
            let screen = screen(&app(), width, height);
            assert_eq!(screen.len(), usize::from(height));
        }
        let empty = App::new(1);
        assert_eq!(screen(&empty, 80, 24)[1], " looking …");
        let mut nobody = App::new(1);
        nobody.show(Ok(HoldersReport { holders: Vec::new(), ..report() }));
        assert_eq!(screen(&nobody, 80, 24)[4], " nobody holds a GPU");
    }

    #[test]
    fn what_is_asked_and_what_went_wrong_is_at_the_foot() {
        let mut app = app();
        press(&mut app, KeyCode::Down);
        press(&mut app, KeyCode::Char('k'));
        assert_eq!(screen(&app, 80, 24)[23], " send TERM, and KILL after 10 s, to python3 (pid 4711)? y/N");
        press(&mut app, KeyCode::Char('n'));
        assert_eq!(screen(&app, 80, 24)[23], " nothing was done");
        press(&mut app, KeyCode::Char('s'));
        app.show(Err("the daemon hangs".to_owned()));
        assert_eq!(screen(&app, 80, 24)[23], " not up to date: the daemon hangs");
    }

    #[test]
    fn no_control_character_reaches_the_terminal() {
        let mut app = App::new(1);
        let mut hostile = report();
        hostile.host = "a\u{1b}[2Jb".to_owned();
        for holder in &mut hostile.holders {
            holder.comm = "\u{202e}evil\u{7}".to_owned();
            holder.argv = vec!["\u{1b}]0;x\u{7}".to_owned()];
            holder.user = Some("\r\n".to_owned());
            holder.unit = Some("\u{9b}2J".to_owned());
        }
        hostile.devices[0].model = Some("\u{1b}c".to_owned());
        app.show(Ok(hostile));
        press(&mut app, KeyCode::Down);
        press(&mut app, KeyCode::Char('k'));
        let text = screen(&app, 120, 30).concat();
        assert!(!text.contains(|character: char| character.is_control() || character == '\u{202e}'), "{text:?}");
        assert!(text.contains("evil"));
    }

    #[test]
    fn help_fits() {
        let mut app = app();
        press(&mut app, KeyCode::Char('?'));
        let screen = screen(&app, 80, 24);
        for line in HELP.lines() {
            assert!(screen.iter().any(|shown| shown.contains(line)), "{line}");
        }
    }
}
