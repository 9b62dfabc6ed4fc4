//! What a user may learn of others' processes: names and arguments only where /proc shows them too.

use std::{fs, path::Path};

use crate::model::{Ancestor, View};

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub uid: u32,
    pub gid: u32,
}

/// Whom /proc hides others' processes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hiding {
    #[default]
    Nobody,
    /// From all but root and the members of this group.
    AllBut(Option<u32>),
}

impl Hiding {
    /// As /proc is mounted for pid 1 and for this process; the stricter of the two counts, and so does not knowing.
    pub fn here(proc: &Path) -> Self {
        let read = |process: &str| {
            let table = fs::read_to_string(proc.join(process).join("mountinfo"));
            table.map_or(Self::AllBut(None), |table| Self::parse(&table))
        };
        read("1").stricter(read("self"))
    }

    /// From a mount table; of several file systems on /proc the last lies on top.
    pub(crate) fn parse(mountinfo: &str) -> Self {
        let on_proc = |line: &str| {
            let (mount, system) = line.split_once(" - ")?;
            let place = mount.split(' ').nth(4)?;
            let mut system = system.split(' ');
            let (kind, options) = (system.next()?, system.nth(1)?);
            (place == "/proc" && kind == "proc").then(|| Self::of_options(options))
        };
        mountinfo.lines().filter_map(on_proc).next_back().unwrap_or(Self::AllBut(None))
    }

    fn of_options(options: &str) -> Self {
        let option = |name: &str| options.split(',').find_map(|option| option.strip_prefix(name)?.strip_prefix('='));
        match option("hidepid") {
            None | Some("0" | "off") => Self::Nobody,
            Some(_) => Self::AllBut(option("gid").and_then(|gid| gid.parse().ok()).filter(|gid| *gid != 0)),
        }
    }

    fn stricter(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nobody, other) => other,
            (one, Self::Nobody) => one,
            (Self::AllBut(one), Self::AllBut(other)) => Self::AllBut(one.filter(|_| one == other)),
        }
    }

    pub fn hides_from(self, peer: Peer) -> bool {
        match self {
            _ if peer.uid == 0 => false,
            Self::Nobody => false,
            Self::AllBut(group) => group != Some(peer.gid),
        }
    }
}

/// A process of another user keeps its numbers and its end; its names go.
pub fn hide_process(ancestor: Ancestor, peer: Peer) -> Ancestor {
    if ancestor.uid == peer.uid {
        return ancestor;
    }
    let Ancestor { key, parent, comm: _, argv: _, argv_cut: _, uid, cgroup_id: _, exit, renewed } = ancestor;
    Ancestor { key, parent, uid, exit, renewed, ..Ancestor::default() }
}

/// Who holds what stays; the only name in a view is that of an orphan's last owner.
pub fn hide_names(view: &mut View) {
    for (_, comm) in view.orphans.iter_mut().filter_map(|orphan| orphan.last_owner.as_mut()) {
        comm.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{How, Orphan, ProcKey, Source};

    const fn peer(uid: u32) -> Peer {
        Peer { uid, gid: uid }
    }

    #[test]
    fn mount_options() {
        let table = |options: &str| {
            format!(
                "20 1 0:19 / /sys rw - sysfs sysfs rw\n\
                 22 1 0:21 / /proc rw,nosuid shared:13 - proc proc {options}\n\
                 30 1 0:40 / /srv/root/proc rw - proc proc rw,hidepid=2\n"
            )
        };
        for (options, expected) in [
            ("rw", Hiding::Nobody),
            ("rw,hidepid=0", Hiding::Nobody),
            ("rw,hidepid=off", Hiding::Nobody),
            ("rw,hidepid=1", Hiding::AllBut(None)),
            ("rw,hidepid=noaccess", Hiding::AllBut(None)),
            ("rw,gid=27,hidepid=invisible", Hiding::AllBut(Some(27))),
            ("rw,hidepid=ptraceable,gid=0", Hiding::AllBut(None)),
            ("rw,hidepid=4,subset=pid", Hiding::AllBut(None)),
        ] {
            assert_eq!(Hiding::parse(&table(options)), expected, "{options}");
        }
        let over = table("rw") + "40 22 0:50 / /proc rw - proc proc rw,hidepid=2\n";
        assert_eq!(Hiding::parse(&over), Hiding::AllBut(None));
        assert_eq!(Hiding::parse(""), Hiding::AllBut(None), "not knowing hides");
    }

    #[test]
    fn the_stricter_counts() {
        let (none, all, group) = (Hiding::Nobody, Hiding::AllBut(None), Hiding::AllBut(Some(27)));
        for (one, other, expected) in [
            (none, none, none),
            (none, group, group),
            (group, none, group),
            (group, group, group),
            (group, all, all),
            (group, Hiding::AllBut(Some(28)), all),
        ] {
            assert_eq!(one.stricter(other), expected);
        }
        assert!(all.hides_from(peer(1000)) && group.hides_from(peer(1000)));
        assert!(!group.hides_from(Peer { uid: 1000, gid: 27 }));
        assert!(!all.hides_from(peer(0)) && !none.hides_from(peer(1000)));
        assert_eq!(Hiding::here(Path::new("/nonexistent")), all);
    }

    #[test]
    fn names_go_and_numbers_stay() {
        let mine = Ancestor {
            key: ProcKey::new(7, 8),
            parent: Some(ProcKey::new(5, 6)),
            comm: "train".to_owned(),
            argv: vec!["train".to_owned(), "--token=x".to_owned()],
            argv_cut: true,
            uid: 1000,
            cgroup_id: 3,
            exit: Some((9, 10)),
            renewed: true,
        };
        assert_eq!(hide_process(mine.clone(), peer(1000)), mine);
        let hidden = hide_process(mine.clone(), peer(1001));
        let expected = Ancestor { comm: String::new(), argv: Vec::new(), argv_cut: false, cgroup_id: 0, ..mine };
        assert_eq!(hidden, expected);

        let mut view = View {
            source: Source::Map,
            backend: None,
            complete: true,
            cannot_see: [].into(),
            lost_events: 0,
            swept_ns: None,
            open_files: [].into(),
            holders: Vec::new(),
            orphans: vec![Orphan {
                slot: 0,
                files: 1,
                how: How::InFlight,
                last_owner: Some((ProcKey::new(7, 8), "train".to_owned())),
            }],
            notes: Vec::new(),
        };
        hide_names(&mut view);
        assert_eq!(view.orphans[0].last_owner, Some((ProcKey::new(7, 8), String::new())));
    }
}
