//! Users by number and by name.

use std::{cell::RefCell, collections::HashMap, fs, os::unix::ffi::OsStrExt as _};

/// In a static executable the C library has to load the modules that nsswitch.conf names, and dies of it where they are
/// of another version, or missing. Then the file alone is asked.
const STATIC: bool = cfg!(target_feature = "crt-static");

thread_local! {
    /// A lookup may ask a directory server; once per user is enough for one run.
    static NAMES: RefCell<HashMap<u32, Option<String>>> = RefCell::default();
}

/// The user's name; `None` for one without.
pub fn name_of(uid: u32) -> Option<String> {
    let ask = || {
        if STATIC {
            return entries(&passwd()).find(|(_, other)| *other == uid).map(|(name, _)| name.to_owned());
        }
        uzers::get_user_by_uid(uid).map(|user| String::from_utf8_lossy(user.name().as_bytes()).into_owned())
    };
    NAMES.with_borrow_mut(|names| names.entry(uid).or_insert_with(ask).clone())
}

pub fn uid_of(name: &str) -> Option<u32> {
    if STATIC {
        return entries(&passwd()).find(|(other, _)| *other == name).map(|(_, uid)| uid);
    }
    uzers::get_user_by_name(name).map(|user| user.uid())
}

fn passwd() -> String {
    String::from_utf8_lossy(&fs::read("/etc/passwd").unwrap_or_default()).into_owned()
}

/// passwd(5)
fn entries(file: &str) -> impl Iterator<Item = (&str, u32)> {
    file.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, uid) = (fields.next()?, fields.next()?, fields.next()?);
        Some((name, uid.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_of_a_file() {
        let file = "root:x:0:0:root:/root:/bin/bash\n# a remark\n+nis\nbroken:x:none:1\nmüller:x:1000:100::/:\n";
        assert_eq!(entries(file).collect::<Vec<_>>(), [("root", 0), ("müller", 1000)]);
    }

    #[test]
    fn whoever_is_not_there_is_nobody() {
        assert_eq!(uid_of("no-such-user-here"), None);
        assert_eq!(name_of(4_000_000_123), None);
        if let Some(root) = name_of(0) {
            assert_eq!(uid_of(&root), Some(0));
        }
    }
}
