//! The demo's whole story with the real binary as its actors, seen through /proc.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::Path,
};

use gpureap::{
    config::Config,
    demo::{
        play::{Story, close, perform},
        stage::Stage,
        watch::Watch,
    },
    exit_code::Exit,
    gpu::devices::{Devices, discover},
    model::{Eyes, Holder, How, LineageSource, NoLineage, ProcKey, Source, Usage, View},
    process::Facts,
};

/// Every thread's descriptors.
struct Walk(Devices);

impl Walk {
    fn holder(&self, tgid: u32) -> Option<Holder> {
        let facts = Facts::read_any(Path::new("/proc"), tgid)?;
        let mut usage: BTreeMap<u32, Usage> = BTreeMap::new();
        let mut tables = fs::read_dir(format!("/proc/{tgid}/task")).ok()?.flatten();
        let mut descriptors = |dir: &Path| {
            let mut any = false;
            for fd in fs::read_dir(dir.join("fd")).into_iter().flatten().flatten() {
                any = true;
                let Ok(meta) = fs::metadata(fd.path()) else { continue };
                let device = meta.file_type().is_char_device().then(|| self.0.by_rdev(meta.rdev())).flatten();
                if let Some(device) = device {
                    usage.entry(device.slot).or_default().fds += 1;
                }
            }
            any
        };
        tables.find(|task| descriptors(&task.path()));
        let mut how = BTreeSet::from([How::Fd]);
        if facts.state == 'Z' {
            how.insert(How::ZombieLeader);
        }
        let key = ProcKey::new(tgid, facts.start_ns);
        let held = !usage.is_empty();
        held.then_some(Holder {
            key,
            usage,
            how,
            private_tids: BTreeSet::new(),
            inherited_from: None,
            from_snapshot: true,
        })
    }
}

impl Eyes for Walk {
    fn view(&self) -> anyhow::Result<View> {
        let pids = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Ok(View {
            source: Source::Snapshot,
            backend: None,
            complete: true,
            cannot_see: BTreeSet::new(),
            lost_events: 0,
            swept_ns: None,
            open_files: BTreeMap::new(),
            holders: pids.filter_map(|pid| self.holder(pid)).collect(),
            orphans: Vec::new(),
            notes: Vec::new(),
        })
    }
    fn sweep(&self) -> anyhow::Result<View> {
        self.view()
    }
    fn look_at(&self, tgid: u32) -> anyhow::Result<Option<Holder>> {
        Ok(self.holder(tgid))
    }
    fn lineage(&self) -> &dyn LineageSource {
        &NoLineage
    }
}

impl Watch for Walk {
    fn eyes(&self) -> &dyn Eyes {
        self
    }
    fn describe(&self) -> String {
        "/proc".to_owned()
    }
}

#[test]
fn the_story_is_right() {
    let stage = match Stage::set(&Config::default(), 3) {
        Ok(stage) => stage,
        Err(error) => {
            eprintln!("SKIPPED: the demo needs root and a mount namespace: {error:#}");
            return;
        }
    };
    let walk = Walk(discover(&stage.config.paths, &stage.config.devices).unwrap());
    let mut told = String::new();
    let mut say = |text: &str| {
        told.push_str(text);
        told.push('\n');
        Ok(())
    };
    let mut story = Story::new(&mut say);
    let program = Path::new(env!("CARGO_BIN_EXE_gpureap"));
    let begun = std::time::Instant::now();
    let exit = perform(&stage, &walk, program, &mut story).unwrap();
    let last = close(&mut story, stage.strike(), begun.elapsed()).unwrap();
    eprintln!("{told}");
    assert_eq!((exit, last), (Exit::Done, Exit::Done));
    assert!(!told.contains('✗'));
    assert!(begun.elapsed().as_secs() < 20);
}
