use std::{fs, path::Path, time::Duration};

use super::*;
use crate::{
    error::exit_of,
    exit_code::Exit,
    journal::{Error, Limits, Opened},
};

/// A journal of a hundred pages; with its log if `log`.
fn sample(place: &Scene, log: bool) -> Vec<(&'static str, Vec<u8>)> {
    let mut writer = place.open("b1");
    writer.apply(&[start("b1", SECOND)]).unwrap();
    for pid in 1000..1050_u32 {
        let opened = u64::from(pid) * SECOND;
        let released = (pid % 3 > 0).then_some(opened + SECOND);
        let row = ProcessRow { key: key(pid), exit_ns: released, ..full_process() };
        let mut changes = vec![process_change(row)];
        changes.extend([GPU0, GPU1].map(|node| Change::Hold(hold(pid, node, opened, released))));
        changes.extend(events().into_iter().map(|event| Change::Event(Event { boot_ns: opened, ..event })));
        writer.apply(&changes).unwrap();
    }
    if !log {
        writer.checkpoint().unwrap();
    }
    let read = |suffix| {
        let mut name = place.path().into_os_string();
        name.push(suffix);
        fs::read(name).ok().filter(|bytes| !bytes.is_empty()).map(|bytes| (suffix, bytes))
    };
    ["", "-wal"].into_iter().filter_map(read).collect()
}

/// All that a daemon does with a file that it finds; whether it was found damaged.
fn use_it(path: &Path) -> bool {
    let mut damaged = false;
    let Opened { mut writer, loss } = match Writer::open(path, "b1") {
        Ok(opened) => opened,
        // The version in the header is what was hit.
        Err(Error::Refused(why)) => {
            assert!(why.contains("is of journal version"), "{why}");
            return true;
        }
        Err(error) => panic!("{error:?}"),
    };
    if let Some(loss) = loss {
        assert!(loss.contains("; it was moved to ") && !loss.contains('\n'), "{loss}");
        damaged = true;
    }
    let limits = Limits { max_age: Duration::from_hours(1), max_size: 1 << 20 };
    let work = |writer: &mut Writer| -> Result<(), Error> {
        writer.open_holds()?;
        writer.open_processes()?;
        writer.apply(&[start("b1", SECOND), process_change(full_process()), Change::Event(lost(1, 1, "x"))])?;
        writer.apply(&[Change::Hold(hold(1001, GPU0, 1001 * SECOND, Some(1)))])?;
        writer.tidy(limits, wall(1_000_000 * SECOND)).map(drop)
    };
    match work(&mut writer) {
        Ok(()) => {}
        Err(Error::Damaged(why)) => {
            damaged = true;
            assert!(!why.contains('\n'), "{why}");
            drop(writer);
            let mut anew = Writer::begin_anew(path, "b1", &why).unwrap();
            assert!(anew.loss.is_some());
            work(&mut anew.writer).unwrap();
        }
        // A key that was hit can stand for another row's.
        Err(Error::Unwritable(why)) => assert!(why.contains("constraint failed"), "{why}"),
        Err(error) => panic!("{error:?}"),
    }
    damaged
}

/// All that a reader does with it.
fn look_at_it(path: &Path) {
    let questions = [Question::default(), Question { nodes: vec![GPU0.into()], ..Question::at(wall(1020 * SECOND)) }];
    for question in questions {
        if let Err(error) = read(path, &question) {
            let text = format!("{error:#}");
            assert!(!text.contains('\n'), "{text}");
            assert_eq!(exit_of(&error), Exit::Unsupported, "{text}");
        }
    }
    drop(crate::journal::reader::events(path, None, |_| Ok(())));
}

fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    let size = bytes.len() as u64;
    match random.below(4) {
        0 => bytes.truncate(random.below(size) as usize),
        // A page of something else.
        1 => {
            let at = random.below(size) as usize & !4095;
            let end = bytes.len().min(at + 4096);
            bytes[at..end].fill_with(|| random.below(256) as u8);
        }
        // Most of what decides is in the first page.
        2 => (0..8).for_each(|_| bytes[random.below(4096) as usize] ^= 1 << random.below(8)),
        _ => (0..=random.below(40)).for_each(|_| bytes[random.below(size) as usize] ^= 1 << random.below(8)),
    }
}

fn damage_and_use(seeds: std::ops::Range<u64>, log: bool) {
    let origin = Scene::in_memory();
    let files = sample(&origin, log);
    let mut found = 0;
    for seed in seeds.clone() {
        let mut random = Random::new(seed);
        let place = Scene::in_memory();
        let hit = random.below(files.len() as u64) as usize;
        for (at, (suffix, bytes)) in files.iter().enumerate() {
            let mut bytes = bytes.clone();
            if at == hit {
                damage(&mut bytes, &mut random);
            }
            let mut path = place.path().into_os_string();
            path.push(suffix);
            fs::write(path, bytes).unwrap();
        }
        look_at_it(&place.path());
        found += u32::from(use_it(&place.path()));
        look_at_it(&place.path());
    }
    println!("{found} of {} damaged files were found damaged", seeds.count());
    assert!(found > 20, "{found}");
}

#[test]
fn a_damaged_file_is_read_or_moved_aside() {
    damage_and_use(0..200, false);
}

#[test]
fn a_damaged_log_is_read_or_moved_aside() {
    let origin = Scene::in_memory();
    let files = sample(&origin, true);
    assert!(files.iter().any(|(suffix, bytes)| *suffix == "-wal" && bytes.len() > 4096));
    // What is cut off a log is a record that was never made: SQLite's own checksums say so, and nothing is wrong.
    for seed in 0..100 {
        let mut random = Random::new(seed);
        let place = Scene::in_memory();
        for (suffix, bytes) in &files {
            let mut bytes = bytes.clone();
            if *suffix == "-wal" {
                damage(&mut bytes, &mut random);
            }
            let mut path = place.path().into_os_string();
            path.push(suffix);
            fs::write(path, bytes).unwrap();
        }
        look_at_it(&place.path());
        use_it(&place.path());
    }
}

#[test]
fn what_is_no_database_at_all_is_moved_aside_and_said() {
    let place = Scene::new();
    fs::write(place.path(), "once upon a time, and many more words than a header has room for, ".repeat(80)).unwrap();
    let error = read(&place.path(), &Question::default()).unwrap_err();
    assert_eq!(exit_of(&error), Exit::Unsupported);
    let text = format!("{error:#}");
    assert!(text.contains("journal.db is damaged: file is not a database"), "{text}");
    let Opened { mut writer, loss } = Writer::open(&place.path(), "b1").unwrap();
    let loss = loss.unwrap();
    assert!(loss.contains("journal.db is damaged: file is not a database; it was moved to "), "{loss}");
    assert!(loss.ends_with(" and a new journal begun"), "{loss}");
    writer.apply(&[start("b1", SECOND)]).unwrap();
    let files = place.files();
    assert!(files.iter().any(|name| name.starts_with("journal.db.damaged-2")), "{files:?}");
}
