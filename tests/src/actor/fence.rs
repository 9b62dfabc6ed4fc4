//! A process that holds a fence, as `reap --fence` does, configured by `GPUREAP_*`.
use std::collections::BTreeSet;

use gpureap::{
    bpf::fence::{Exemptions, Fence},
    config::{Config, Overrides, Paths},
    gpu::devices,
};
use serde_json::json;

use super::{sys, truth};

/// Fences every device of the configuration, says so, and lives until its standard input closes. What the exit code is
/// then does not matter: the fence goes with the process.
pub(super) fn hold() -> ! {
    let paths = Paths::from_env(|name| std::env::var_os(name));
    let config = Config::load(paths, Overrides::default()).expect("the configuration");
    let devices = devices::discover(&config.paths, &config.devices).expect("the devices");
    let slots: BTreeSet<_> = devices.gpus().map(|device| device.slot).collect();
    let fence = Fence::raise(&config, &devices, &slots, None, &Exemptions::default()).expect("a fence");
    truth::say(&json!({"ready": true, "pid": sys::pid(), "devices": {}}));
    let _held = fence;
    sys::live()
}
