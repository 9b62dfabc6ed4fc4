use super::*;

#[test]
fn a_cursor_survives_and_what_is_none_is_none() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Cursor::read(dir.path()).unwrap(), None);
    let cursor = Cursor { sent: 7, gone: 2, ..Cursor::at(Position { id: 5, time_ns: 9 }) };
    cursor.write(dir.path()).unwrap();
    assert_eq!(Cursor::read(dir.path()).unwrap(), Some(cursor));
    fs::write(dir.path().join(FILE), "{").unwrap();
    assert_eq!(Cursor::read(dir.path()).unwrap(), None);
    // A link in the place of the new file is not followed.
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, dir.path().join(format!("{FILE}.new"))).unwrap();
    assert!(cursor.write(dir.path()).is_err());
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
}
