//! `gpureap-actor play [ARGS…]`: one process that does what it is told, a line at a time, and answers each with a number.
//!
//! | line | what it does | answer |
//! |---|---|---|
//! | `open NODE` | opens it | the descriptor |
//! | `close FD` | | 0 |
//! | `churn N NODE` | opens and closes it so many times | 0 |
//! | `comm NAME` | takes this name | 0 |
//! | `thread NAME` | starts a thread of this name | its id |
//! | `fork NAME` | starts a child of this name, which only lives | its pid |
//! | `unshare FLAGS` | goes into namespaces of its own, by the flags' number | 0 |
//! | `core` | lets itself dump core | 0 |
//! | `on-term CODE` | handles SIGTERM from now on: it exits with CODE | 0 |
//! | `raise NAME SIGNAL` | the thread of this name raises the signal, by number | none |
//! | `fault NAME` | the thread of this name writes where nothing is | none |
//! | `exit CODE` | | none |
//! | `eat` | takes memory without end | none |
use std::{
    collections::BTreeMap,
    io::{self, BufRead as _},
    sync::{
        atomic::{AtomicI32, Ordering},
        mpsc::{self, Sender},
    },
};

use super::sys::{self, O_RDWR, Pid};

/// What a thread does.
enum Deed {
    Raise(i32),
    Fault,
}

static TERM_CODE: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_term(_: i32) {
    sys::exit(TERM_CODE.load(Ordering::Relaxed));
}

/// The threads by name.
#[derive(Default)]
struct Company(BTreeMap<String, Sender<Deed>>);

impl Company {
    fn start(&mut self, name: &str) -> Pid {
        let (deeds, orders) = mpsc::channel();
        let (tell, hear) = mpsc::channel();
        let own = name.to_owned();
        std::thread::spawn(move || {
            sys::set_comm(own.as_bytes());
            tell.send(sys::tid()).expect("the main thread listens");
            match orders.recv() {
                Ok(Deed::Raise(signal)) => sys::raise(signal),
                Ok(Deed::Fault) => sys::fault(),
                Err(_) => {}
            }
        });
        self.0.insert(name.to_owned(), deeds);
        hear.recv().expect("the thread has begun")
    }

    fn order(&self, name: &str, deed: Deed) {
        self.0.get(name).expect("a thread of this name").send(deed).expect("the thread listens");
    }
}

fn child(name: &str) -> Pid {
    let pid = sys::fork();
    if pid == 0 {
        // Between a fork of a threaded process and its end only system calls are made.
        sys::set_comm(name.as_bytes());
        sys::outlive_stdin();
        sys::exit(0);
    }
    pid
}

fn churn(times: usize, node: &str) {
    for _ in 0..times {
        sys::close(sys::open(node, O_RDWR));
    }
}

fn eat() -> ! {
    loop {
        sys::take_memory(4 << 20).ok();
    }
}

/// What it is told until its standard input ends. `None`: there is nothing to answer.
fn obey(line: &str, company: &mut Company) -> Option<i32> {
    let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("a number, not {text}"));
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["open", node] => return Some(sys::open(node, O_RDWR)),
        ["close", fd] => sys::close(number(fd)),
        ["churn", times, node] => churn(number(times) as usize, node),
        ["comm", name] => sys::set_comm(name.as_bytes()),
        ["thread", name] => return Some(company.start(name)),
        ["fork", name] => return Some(child(name)),
        ["unshare", flags] => sys::unshare(number(flags)).expect("unshare"),
        ["core"] => sys::dump_core(true),
        ["on-term", code] => {
            TERM_CODE.store(number(code), Ordering::Relaxed);
            sys::handle(libc::SIGTERM, on_term);
        }
        ["raise", name, signal] => {
            company.order(name, Deed::Raise(number(signal)));
            return None;
        }
        ["fault", name] => {
            company.order(name, Deed::Fault);
            return None;
        }
        ["exit", code] => sys::exit(number(code)),
        ["eat"] => eat(),
        _ => panic!("what is `{line}`?"),
    }
    Some(0)
}

pub(super) fn play() {
    sys::dump_core(false);
    let mut company = Company::default();
    sys::write_all(1, b"0\n");
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        if let Some(answer) = obey(&line, &mut company) {
            sys::write_all(1, format!("{answer}\n").as_bytes());
        }
    }
}
