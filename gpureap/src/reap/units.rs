//! Stopping units through systemd's D-Bus API, so that nobody starts again what was stopped.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use zbus::{blocking::connection::Builder, proxy, zvariant::OwnedObjectPath};

/// Time for the bus and the manager to take the order; how long the stop itself takes is not waited for here.
const PATIENCE: Duration = Duration::from_secs(5);

/// org.freedesktop.systemd1(5)
#[proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1",
    gen_async = false
)]
trait Manager {
    fn stop_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;
}

fn ask(unit: &str) -> zbus::Result<()> {
    let bus = Builder::system()?.method_timeout(PATIENCE).build()?;
    ManagerProxy::new(&bus)?.stop_unit(unit, "replace").map(drop)
}

/// Orders a unit to be stopped. The error is what stands in the way, for people.
pub fn stop(unit: &str) -> Result<(), String> {
    let (answer, answered) = mpsc::channel();
    let name = unit.to_owned();
    // Connecting knows no time limit; a bus that hangs keeps the thread, not us.
    thread::spawn(move || {
        let outcome = ask(&name).map_err(|error| match error {
            zbus::Error::MethodError(name, text, _) => text.unwrap_or_else(|| name.to_string()),
            other => other.to_string(),
        });
        // Nobody waits any more when the time was up.
        drop(answer.send(outcome));
    });
    match answered.recv_timeout(PATIENCE) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            Err(format!("systemd did not answer within {} s", PATIENCE.as_secs()))
        }
    }
}
