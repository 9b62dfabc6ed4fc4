//! Both sides of the daemon's socket.

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    api::wire::{self, Ancestor, Answer, Code, Device, Devices, Holder, Lineage, LookAt, MAX_KEYS, Status, View},
    history::event::Event,
    model,
};

/// What a client sends.
pub(super) fn request(input: &[u8]) {
    match wire::parse(input) {
        Ok(request) => {
            assert_eq!(request.v, wire::VERSION);
            assert!(request.of.len() <= MAX_KEYS);
            assert_eq!(wire::parse(&wire::line(&request)), Ok(request));
        }
        Err(refusal) => {
            assert!(matches!(refusal.code, Code::BadRequest | Code::Version));
            let line = refusal.line();
            assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1), "a line is one line");
            assert!(line.len() < 1024, "{} bytes", line.len());
        }
    }
}

/// What a client is told by whoever has the socket.
pub(super) fn answer(input: &[u8]) {
    if let Some(view) = read::<View>(input) {
        let known = model::View::from(view);
        let sent = View::from(known.clone());
        assert_eq!(model::View::from(again(&sent)), known);
    }
    if let Some(Lineage { processes }) = read(input) {
        for ancestor in processes {
            let known = model::Ancestor::from(ancestor);
            assert_eq!(model::Ancestor::from(again(&Ancestor::from(known.clone()))), known);
        }
    }
    if let Some(Devices { devices, notes: _ }) = read(input) {
        for device in devices {
            let known = model::Device::from(device);
            assert_eq!(model::Device::from(again(&Device::new(&known, true))), known);
        }
    }
    if let Some(LookAt { holder: Some(holder) }) = read(input) {
        let known = model::Holder::from(holder);
        assert_eq!(model::Holder::from(again(&Holder::from(known.clone()))), known);
    }
    drop(read::<Status>(input));
    if let Some(event) = read::<Event>(input) {
        assert_eq!(again(&event), event);
    }
}

fn read<T: DeserializeOwned>(input: &[u8]) -> Option<T> {
    let Answer { v, answer, error: _ } = wire::answer::<T>(input).ok()?;
    assert_eq!(v, wire::VERSION);
    answer
}

fn again<T: Serialize + DeserializeOwned>(value: &T) -> T {
    let line = wire::line(value);
    assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
    serde_json::from_slice(&line).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&line)))
}
