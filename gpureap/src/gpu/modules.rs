//! The driver's kernel modules: who refers to which, from /sys/module.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use serde::{Deserialize, Serialize};

/// The module that all others of the driver stand on.
pub const ROOT: &str = "nvidia";

/// One loaded module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    pub name: String,
    /// Modules, open files, and whatever else the kernel counts. `None`: built in, or not readable; -1 while it is
    /// being unloaded.
    pub refcnt: Option<i64>,
    /// Modules that need this one.
    pub holders: BTreeSet<String>,
    /// Of a module with such a parameter: whether it sets display modes, and so uses the GPU for the console.
    pub modeset: Option<bool>,
}

impl Module {
    /// References by others than modules: open files, the console, whatever attached itself in the kernel.
    pub fn by_others(&self) -> Option<u64> {
        let count = u64::try_from(self.refcnt?).ok()?;
        Some(count.saturating_sub(self.holders.len() as u64))
    }

    /// `nvidia: 85 references, held by gdrdrv, nvidia_uvm`.
    pub fn sentence(&self) -> String {
        let Self { name, refcnt, holders, modeset: _ } = self;
        let count = match refcnt {
            None => "an unknown number of references".to_owned(),
            Some(1) => "1 reference".to_owned(),
            Some(count) => format!("{count} references"),
        };
        if holders.is_empty() {
            return format!("{name}: {count}");
        }
        let names: Vec<&str> = holders.iter().map(String::as_str).collect();
        format!("{name}: {count}, held by {}", names.join(", "))
    }
}

/// `nvidia` and all modules that need it, also through others; empty when the driver is not loaded.
pub fn read(sys: &Path) -> Vec<Module> {
    let mut found: BTreeMap<String, Module> = BTreeMap::new();
    let mut next = vec![ROOT.to_owned()];
    while let Some(name) = next.pop() {
        if found.contains_key(&name) {
            continue;
        }
        let Some(module) = one(&sys.join("module").join(&name), &name) else { continue };
        next.extend(module.holders.iter().cloned());
        found.insert(name, module);
    }
    found.into_values().collect()
}

fn one(place: &Path, name: &str) -> Option<Module> {
    if !place.is_dir() {
        return None;
    }
    let text = |file: &str| fs::read_to_string(place.join(file)).ok();
    let holders = fs::read_dir(place.join("holders")).into_iter().flatten().flatten();
    Some(Module {
        name: name.to_owned(),
        refcnt: text("refcnt").and_then(|text| text.trim().parse().ok()),
        holders: holders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect(),
        modeset: text("parameters/modeset").map(|text| matches!(text.trim(), "Y" | "1")),
    })
}

/// In which order the modules can be unloaded: each after all that need it. `nvidia` is the last.
pub fn unload_order(modules: &[Module]) -> Vec<String> {
    let mut left: BTreeMap<&str, BTreeSet<&str>> = modules
        .iter()
        .map(|module| (module.name.as_str(), module.holders.iter().map(String::as_str).collect()))
        .collect();
    let mut order = Vec::new();
    while !left.is_empty() {
        let known: BTreeSet<&str> = left.keys().copied().collect();
        let free: Vec<&str> =
            left.iter().filter(|(_, holders)| holders.is_disjoint(&known)).map(|(name, _)| *name).collect();
        if free.is_empty() {
            // The kernel allows no circle; a changing tree may look like one.
            order.extend(left.into_keys().map(str::to_owned));
            break;
        }
        for name in free {
            left.remove(name);
            order.push(name.to_owned());
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    /// name, refcnt, holders
    fn tree(modules: &[(&str, &str, &[&str])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, refcnt, holders) in modules {
            let place = dir.path().join("module").join(name);
            fs::create_dir_all(place.join("holders")).unwrap();
            if !refcnt.is_empty() {
                fs::write(place.join("refcnt"), format!("{refcnt}\n")).unwrap();
            }
            for holder in *holders {
                std::os::unix::fs::symlink(format!("../../{holder}"), place.join("holders").join(holder)).unwrap();
            }
        }
        dir
    }

    /// A display host with GPUDirect: lsmod's picture.
    fn full() -> tempfile::TempDir {
        let dir = tree(&[
            ("nvidia", "91", &["nvidia_uvm", "nvidia_modeset", "gdrdrv", "nvidia_peermem"]),
            ("nvidia_uvm", "4", &[]),
            ("nvidia_modeset", "6", &["nvidia_drm"]),
            ("nvidia_drm", "3", &[]),
            ("gdrdrv", "0", &[]),
            ("nvidia_peermem", "0", &[]),
            // In the kernel's own tree, and no part of the driver.
            ("nvidia_wmi_ec_backlight", "0", &[]),
        ]);
        fs::create_dir(dir.path().join("module/nvidia_drm/parameters")).unwrap();
        fs::write(dir.path().join("module/nvidia_drm/parameters/modeset"), "Y\n").unwrap();
        dir
    }

    #[test]
    fn all_that_stands_on_the_driver() {
        let dir = full();
        let modules = read(dir.path());
        let names: Vec<&str> = modules.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["gdrdrv", "nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia_uvm"]);
        assert_eq!((modules[1].refcnt, modules[1].by_others()), (Some(91), Some(87)));
        assert_eq!((modules[2].modeset, modules[3].modeset), (Some(true), None));
        assert_eq!(
            modules[1].sentence(),
            "nvidia: 91 references, held by gdrdrv, nvidia_modeset, nvidia_peermem, nvidia_uvm"
        );
        assert_eq!(modules[5].sentence(), "nvidia_uvm: 4 references");
        let order = unload_order(&modules);
        assert_eq!(order, ["gdrdrv", "nvidia_drm", "nvidia_peermem", "nvidia_uvm", "nvidia_modeset", "nvidia"]);
    }

    #[test]
    fn hosts_without_and_with_little() {
        assert_eq!(read(Path::new("/nonexistent")), []);
        // Built in: a directory with parameters alone.
        let dir = tree(&[("nvidia", "", &[])]);
        let [module] = &read(dir.path())[..] else { panic!("one module") };
        assert_eq!((module.refcnt, module.by_others()), (None, None));
        assert_eq!(module.sentence(), "nvidia: an unknown number of references");
        // On its way out.
        let dir = tree(&[("nvidia", "-1", &["nvidia_uvm"])]);
        let [module] = &read(dir.path())[..] else { panic!("the holder has gone already") };
        assert_eq!((module.refcnt, module.by_others()), (Some(-1), None));
        // A holder that has gone, and a single reference.
        let dir = tree(&[("nvidia", "1", &["nvidia_uvm"]), ("nvidia_uvm", "1", &[])]);
        let modules = read(dir.path());
        assert_eq!(modules[0].by_others(), Some(0));
        assert_eq!(modules[1].sentence(), "nvidia_uvm: 1 reference");
    }

    #[test]
    fn a_circle_still_ends() {
        let module = |name: &str, holder: &str| Module {
            name: name.to_owned(),
            holders: [holder.to_owned()].into(),
            ..Module::default()
        };
        assert_eq!(unload_order(&[module("a", "b"), module("b", "a")]), ["a", "b"]);
    }

    #[test]
    fn the_recorded_tree_of_an_h200() {
        let sys = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/h200/sys");
        let modules = read(&sys);
        assert_eq!(modules.len(), 1);
        assert_eq!((modules[0].name.as_str(), modules[0].refcnt), ("nvidia", None));
    }
}
