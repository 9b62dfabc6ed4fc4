use super::*;

fn fixture() -> Paths {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/h200");
    Paths { proc: root.join("proc"), sys: root.join("sys"), dev: root.join("dev"), ..Paths::default() }
}

fn summary(devices: &Devices) -> Vec<(String, u32, Option<u32>, DeviceKind)> {
    devices
        .list()
        .iter()
        .map(|device| (device.node.display().to_string(), device.major, device.minor, device.kind))
        .collect()
}

#[test]
fn recorded_host() {
    let stand_in = StandIn::new(4, 20, "/dev/tty20".into()).unwrap();
    let devices = discover(&fixture(), &[stand_in]).unwrap();
    let expected = [
        ("/dev/nvidia0", 195, Some(0), DeviceKind::Gpu),
        ("/dev/tty20", 4, Some(20), DeviceKind::Standin),
        ("/dev/nvidiactl", 195, Some(255), DeviceKind::Ctl),
        ("/dev/nvidia-modeset", 195, Some(254), DeviceKind::Modeset),
        ("/dev/nvidia-uvm", 238, Some(0), DeviceKind::Uvm),
        ("/dev/nvidia-uvm-tools", 238, Some(1), DeviceKind::UvmTools),
        ("/dev/nvidia-nvswitchctl", 239, Some(255), DeviceKind::Nvswitch),
        ("/dev/nvidia-nvlink", 240, Some(0), DeviceKind::Nvlink),
        ("/dev/nvidia-caps/nvidia-cap1", 241, Some(1), DeviceKind::Cap),
        ("/dev/nvidia-caps/nvidia-cap2", 241, Some(2), DeviceKind::Cap),
        ("/dev/nvidia*", 195, None, DeviceKind::Gpu),
        ("/dev/nvidia-uvm*", 238, None, DeviceKind::Uvm),
        ("/dev/nvidia-nvswitch*", 239, None, DeviceKind::Nvswitch),
        ("/dev/nvidia-nvlink*", 240, None, DeviceKind::Nvlink),
        ("/dev/nvidia-caps/*", 241, None, DeviceKind::Cap),
        ("/dev/nvidia-caps-imex-channels/*", 242, None, DeviceKind::Imex),
    ];
    let expected: Vec<_> =
        expected.iter().map(|(node, major, minor, kind)| ((*node).to_owned(), *major, *minor, *kind)).collect();
    assert_eq!(summary(&devices), expected);
    for (position, device) in devices.list().iter().enumerate() {
        assert_eq!(device.slot as usize, position);
    }
    let gpu = devices.get(0).unwrap();
    assert_eq!((gpu.gpu, gpu.index), (Some(0), Some(0)));
    assert_eq!(gpu.uuid.as_deref(), Some("GPU-00000000-1111-2222-3333-444444444444"));
    assert_eq!(gpu.bdf.as_deref(), Some("0000:00:06.0"));
    assert_eq!(gpu.model.as_deref(), Some("NVIDIA H200"));
    assert_eq!(devices.get(8).unwrap().model.as_deref(), Some("config"));
    assert_eq!(devices.get(9).unwrap().model.as_deref(), Some("monitor"));
    assert!(devices.is_present(0) && devices.is_present(2) && !devices.is_present(3) && !devices.is_present(10));
    assert_eq!(devices.notes(), <[String; 0]>::default());
}

#[test]
fn numbers_that_nobody_told_us_about_fall_under_the_wildcard() {
    let devices = discover(&fixture(), &[]).unwrap();
    let node = |major, minor| devices.by_number(major, minor).map(|device| device.node.to_str().unwrap());
    assert_eq!(node(195, 0), Some("/dev/nvidia0"));
    assert_eq!(node(195, 7), Some("/dev/nvidia*"));
    assert_eq!(node(242, 2047), Some("/dev/nvidia-caps-imex-channels/*"));
    assert_eq!(node(1, 3), None);
    assert_eq!(node(u32::MAX, u32::MAX), None);
    assert_eq!(devices.by_rdev(rustix::fs::makedev(195, 255)).unwrap().kind, DeviceKind::Ctl);
}

#[test]
fn no_driver_and_no_stand_in_is_an_empty_table() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths { proc: dir.path().into(), sys: dir.path().into(), dev: dir.path().into(), ..Paths::default() };
    assert!(discover(&paths, &[]).unwrap().is_empty());
    // A block device's major is no character device's.
    fs::write(dir.path().join("devices"), "Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n").unwrap();
    assert!(discover(&paths, &[]).unwrap().is_empty());
}

#[test]
fn nodes_stand_in_for_a_hidden_driver_list() {
    let dir = tempfile::tempdir().unwrap();
    let paths =
        Paths { proc: dir.path().into(), sys: dir.path().into(), dev: dir.path().join("dev"), ..Paths::default() };
    fs::create_dir_all(&paths.dev).unwrap();
    fs::write(dir.path().join("devices"), "garbage\n\u{0}\n195 nvidia-frontend\nx y z\n").unwrap();
    for name in ["nvidia3", "nvidia0", "nvidia", "nvidia-1", "nvidiactl", "nvidia300"] {
        fs::write(paths.dev.join(name), "").unwrap();
    }
    let devices = discover(&paths, &[]).unwrap();
    let gpus: Vec<_> = devices.gpus().map(|device| (device.gpu, device.minor)).collect();
    assert_eq!(gpus, [(Some(0), Some(0)), (Some(3), Some(3)), (None, None)]);
}

#[test]
fn too_many_devices() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths { proc: dir.path().into(), sys: dir.path().into(), dev: dir.path().into(), ..Paths::default() };
    fs::write(dir.path().join("devices"), "195 nvidia\n242 nvidia-caps-imex-channels\n").unwrap();
    fs::create_dir(dir.path().join("nvidia-caps-imex-channels")).unwrap();
    for channel in 0..2048 {
        fs::write(dir.path().join(format!("nvidia-caps-imex-channels/channel{channel}")), "").unwrap();
    }
    let stand_ins =
        |count| (0..count).map(|minor| StandIn::new(4, minor, "/dev/x".into()).unwrap()).collect::<Vec<_>>();
    let devices = discover(&paths, &stand_ins(9)).unwrap();
    assert_eq!(devices.list().len(), MAX_SLOTS as usize);
    assert_eq!(devices.list().last().unwrap().minor, None);
    assert_eq!(devices.by_number(242, 2047).unwrap().minor, None);
    // 9 stand-ins, ctl, modeset, 2048 channels; two of 256 slots are for wildcards.
    let note = format!("{} device nodes have no entry of their own", 9 + 2 + 2048 - 254);
    assert!(devices.notes()[0].starts_with(&note), "{:?}", devices.notes());
    assert!(discover(&paths, &stand_ins(255)).is_err());
}

#[test]
fn a_stand_in_may_not_be_a_real_device() {
    let stand_in = StandIn::new(195, 0, "/dev/fake".into()).unwrap();
    let message = discover(&fixture(), &[stand_in]).unwrap_err().message;
    assert_eq!(message, "the stand-in /dev/fake (195:0) is a real NVIDIA device");
}

#[test]
fn fingerprint_follows_the_driver() {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths { proc: dir.path().into(), sys: dir.path().into(), dev: dir.path().into(), ..Paths::default() };
    let fingerprint = || discover(&paths, &[]).unwrap().fingerprint();
    let module = dir.path().join("module/nvidia");
    let (empty, again) = (fingerprint(), fingerprint());
    assert_eq!(empty, again);
    fs::write(dir.path().join("devices"), "195 nvidia\n").unwrap();
    fs::create_dir_all(&module).unwrap();
    let loaded = fingerprint();
    assert_ne!(empty, loaded);
    // The old directory stays alive while the new one is made, so that the two differ for certain.
    fs::rename(&module, dir.path().join("old")).unwrap();
    fs::create_dir_all(&module).unwrap();
    assert_ne!(loaded, fingerprint());
}

#[test]
fn hostile_information_is_survived() {
    for text in ["", ":", "Device Minor: 99999999999", "Device Minor: 255\nGPU UUID: \nModel", "\u{0}\u{1}:\u{2}"] {
        let Information { minor, uuid, .. } = Information::parse(text);
        assert_eq!((minor, uuid), (None, None), "{text:?}");
    }
    assert_eq!(Information::parse("GPU UUID: GPU-????????-????").uuid, None);
}
