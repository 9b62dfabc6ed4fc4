use serde_json::json;

use super::*;

fn round<T: Serialize + DeserializeOwned>(value: &T) -> T {
    serde_json::from_slice(&line(value)).unwrap()
}

#[test]
fn answers_of_another_version_are_not_believed() {
    let read = |text: &str| answer::<Lineage>(text.as_bytes()).map(|answer| answer.answer.is_some());
    assert_eq!(read(r#"{"v":1,"answer":{"processes":[]}}"#), Ok(true));
    for text in [
        r#"{"v":2,"answer":{"processes":[]}}"#,
        r#"{"v":2,"answer":7}"#,
        r#"{"v":2,"error":{"code":"new","message":"x"}}"#,
    ] {
        let expected = "it is of version 2 of the protocol, and this gpureap speaks 1";
        assert_eq!(read(text), Err(expected.to_owned()), "{text}");
    }
    assert!(read(r#"{"v":1,"answer":7}"#).is_err() && read("{}").is_err());
}

fn view() -> model::View {
    let usage = model::Usage { fds: 3, maps: 2, first_open_ns: Some(1), last_open_ns: None, ever_mapped: true };
    model::View {
        source: Source::Map,
        backend: Some(Backend::Gate),
        complete: true,
        cannot_see: [How::InFlight, How::IoUring].into(),
        lost_events: 7,
        swept_ns: Some(u64::MAX),
        open_files: [(0, 1), (255, 2)].into(),
        holders: vec![model::Holder {
            key: ProcKey::new(42, 1 << 60),
            usage: [(3, usage), (9, model::Usage::default())].into(),
            how: [How::Fd, How::ZombieLeader].into(),
            private_tids: [43].into(),
            inherited_from: Some(ProcKey::new(41, 5)),
            from_snapshot: true,
        }],
        orphans: vec![model::Orphan {
            slot: 3,
            files: 1,
            how: How::InFlight,
            last_owner: Some((ProcKey::new(40, 4), "py\u{1b}[31m\"".to_owned())),
        }],
        notes: vec!["a note".to_owned()],
    }
}

#[test]
fn nothing_of_the_model_is_lost_on_the_way() {
    assert_eq!(model::View::from(round(&View::from(view()))), view());
    let ancestor = model::Ancestor {
        key: ProcKey::new(1, 2),
        parent: Some(ProcKey::new(3, 4)),
        comm: "bash".to_owned(),
        argv: vec!["bash".to_owned(), String::new()],
        argv_cut: true,
        uid: 1000,
        cgroup_id: u64::MAX,
        exit: Some((5, 9)),
        renewed: true,
    };
    assert_eq!(model::Ancestor::from(round(&Ancestor::from(ancestor.clone()))), ancestor);
    let device = model::Device {
        slot: 5,
        node: "/dev/nvidia0".into(),
        major: 195,
        minor: None,
        kind: DeviceKind::UvmTools,
        gpu: Some(0),
        index: Some(1),
        uuid: Some("GPU-1".to_owned()),
        bdf: Some("0000:00:06.0".to_owned()),
        model: Some("H200".to_owned()),
    };
    let sent = round(&Device::new(&device, true));
    assert!(sent.present);
    assert_eq!(model::Device::from(sent), device);
}

#[test]
fn a_line_is_one_line() {
    let bytes = line(&Answer::of(View::from(view())));
    assert_eq!(bytes.iter().position(|byte| *byte == b'\n'), Some(bytes.len() - 1));
}

#[test]
fn requests() {
    for (text, expected) in [
        (r#"{"v":1,"get":"view"}"#, Ok(Request::new(Get::View))),
        (r#"{"get":"sweep","v":1,"later":[1]}"#, Ok(Request::new(Get::Sweep))),
        (r#"{"v":1,"get":"look_at","pid":7}"#, Ok(Request::look_at(7))),
        (r#"{"v":1,"get":"lineage","of":[{"pid":7,"start_ns":8,"x":1}]}"#, Ok(Request::lineage(&[ProcKey::new(7, 8)]))),
        (r#"{"v":1,"get":"look_at"}"#, Err(Code::BadRequest)),
        (r#"{"v":1,"get":"kill"}"#, Err(Code::BadRequest)),
        (r#"{"v":1,"get":"view","pid":-1}"#, Err(Code::BadRequest)),
        (r#"{"v":2,"get":{"new":"ways"}}"#, Err(Code::Version)),
        (r#"{"get":"view"}"#, Err(Code::BadRequest)),
        ("", Err(Code::BadRequest)),
        ("GET / HTTP/1.1", Err(Code::BadRequest)),
        ("[[[[", Err(Code::BadRequest)),
    ] {
        assert_eq!(parse(text.as_bytes()).map_err(|refusal| refusal.code), expected, "{text}");
    }
    let deep = "[".repeat(MAX_REQUEST);
    assert_eq!(parse(deep.as_bytes()).unwrap_err().code, Code::BadRequest);
    let many = Request::lineage(&vec![ProcKey::new(4_194_304, u64::MAX); MAX_KEYS]);
    assert!(line(&many).len() < MAX_REQUEST, "the largest request has room");
    assert_eq!(parse(&line(&many)), Ok(many));
    let more = Request::lineage(&vec![ProcKey::new(1, 1); MAX_KEYS + 1]);
    assert_eq!(parse(&line(&more)).unwrap_err().code, Code::BadRequest);
}

#[test]
fn what_a_later_version_adds_is_ignored() {
    let text = json!({"v": 1, "new": 1, "answer": {"source": "map", "backend": "gate", "complete": true,
        "holders": [{"pid": 1, "start_ns": 2, "new": {}, "usage": [{"slot": 0, "new": 1}]}], "new": []}});
    let answer: Answer<View> = serde_json::from_value(text).unwrap();
    let view = model::View::from(answer.answer.unwrap());
    assert_eq!(view.holders[0].key, ProcKey::new(1, 2));
    let text = json!({"v": 1, "error": {"code": "new", "message": "m"}});
    let answer: Answer<View> = serde_json::from_value(text).unwrap();
    assert_eq!(answer.error.unwrap().code, Code::Other);
}

#[test]
fn ten_thousand_holders_are_few_bytes() {
    let model::View { holders, .. } = view();
    let many = (0..10_000).map(|pid| model::Holder { key: ProcKey::new(pid, 1), ..holders[0].clone() });
    let many = model::View { holders: many.collect(), ..view() };
    let bytes = line(&Answer::of(View::from(many.clone())));
    assert!(bytes.len() < MAX_ANSWER / 8, "{} bytes", bytes.len());
    let answer: Answer<View> = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(model::View::from(answer.answer.unwrap()), many);
}
