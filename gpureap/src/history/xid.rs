//! Xids: the driver's error reports, from its lines in the kernel's log or its tracepoint.

use super::{event::Xid, report::XidClass};

/// `NVRM: Xid (PCI:0000:00:06): 31, pid=462, name=python3, channel 0x0000000a, …`; what is after `NVRM: ` is the same in
/// the tracepoint's text. `None` for any other line.
pub fn parse(line: &str, source: &str) -> Option<Xid> {
    let rest = line[line.find("Xid (")?..].strip_prefix("Xid (")?;
    let (address, rest) = rest.split_once("): ")?;
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, rest) = rest.split_at(digits);
    let xid = number.parse().ok()?;
    let message = rest.trim_start_matches([',', ' ']).trim_end();
    let field = |name: &str| {
        let value = message.split(", ").find_map(|part| part.strip_prefix(name))?;
        let value = value.trim_matches('\'');
        (!value.is_empty() && !value.starts_with("<unknown")).then(|| value.to_owned())
    };
    Some(Xid {
        bdf: bdf(address)?,
        node: None,
        xid,
        pid: field("pid=").and_then(|pid| pid.parse().ok()).filter(|pid| *pid != 0),
        name: field("name="),
        message: message.to_owned(),
        source: source.to_owned(),
    })
}

/// `PCI:0000:00:06` is without the function, old drivers are without the `PCI:`, and some without the domain.
fn bdf(address: &str) -> Option<String> {
    let address = address.strip_prefix("PCI:").unwrap_or(address).to_ascii_lowercase();
    let (place, function) = address.split_once('.').unwrap_or((&address, "0"));
    let parts: Vec<u32> = place.split(':').map(|part| u32::from_str_radix(part, 16).ok()).collect::<Option<_>>()?;
    let (domain, bus, device) = match parts.as_slice() {
        [domain, bus, device] => (*domain, *bus, *device),
        [bus, device] => (0, *bus, *device),
        _ => return None,
    };
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{}", u32::from_str_radix(function, 16).ok()?))
}

/// Numbers and who is to blame after NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors); the words are ours.
const CATALOGUE: &[(u32, XidClass, &str)] = {
    use XidClass::{Application, Driver, Hardware, ResultOfAKill};
    &[
        (8, Application, "a channel was stalled"),
        (11, Application, "an invalid or corrupted push buffer"),
        (12, Driver, "the driver could not handle an exception of the GPU"),
        (13, Application, "a graphics or compute engine exception, as by an access out of bounds"),
        (31, Application, "a memory page fault, as by an illegal address"),
        (32, Application, "an invalid or corrupted push buffer stream"),
        (38, Driver, "a firmware error of the driver"),
        (43, Application, "the GPU stopped processing of one application"),
        (44, Application, "a graphics engine fault while switching contexts"),
        (45, ResultOfAKill, "channels were cleaned up after their process ended or another error"),
        (46, Driver, "the GPU stopped processing"),
        (48, Hardware, "a double-bit error of memory (ECC)"),
        (54, Hardware, "an auxiliary power cable is not connected"),
        (56, Hardware, "a display engine error"),
        (61, Hardware, "an internal micro-controller breakpoint or warning"),
        (62, Hardware, "an internal micro-controller halt"),
        (63, Hardware, "a memory row or page was marked for remapping"),
        (64, Hardware, "a memory row or page could not be marked for remapping"),
        (68, Application, "an exception of the video processor"),
        (69, Application, "a graphics engine class error"),
        (74, Hardware, "an NVLink error"),
        (79, Hardware, "the GPU has fallen off the bus"),
        (92, Hardware, "many single-bit errors of memory (ECC)"),
        (93, Hardware, "an error of the GPU's firmware memory"),
        (94, Application, "a contained memory error (ECC): only the named application is affected"),
        (95, Hardware, "an uncontained memory error (ECC): the GPU needs a reset"),
        (109, Application, "switching contexts took too long"),
        (119, Driver, "the GPU system processor did not answer"),
        (120, Driver, "the GPU system processor reported an error"),
        (121, Hardware, "a chip-to-chip link error"),
        (123, Driver, "a power-management processor error"),
        (136, Hardware, "a link could not be trained"),
        (137, Application, "an NVLink access that was refused"),
        (140, Hardware, "an unrecovered memory error (ECC)"),
        (143, Hardware, "a GPU that could not be initialised"),
        (154, Hardware, "the GPU tells which recovery it needs"),
    ]
};

/// What it means and who is to blame by its number; `pid_was_killed`: the process that it names had been killed by a signal
/// just before, or nobody is named and one of the holders had.
pub fn classify(xid: u32, pid_was_killed: bool) -> (XidClass, &'static str) {
    let found = CATALOGUE.iter().find(|(number, ..)| *number == xid);
    let (class, meaning) = found
        .map_or((XidClass::Unknown, "not in the catalogue that this gpureap knows"), |(_, class, meaning)| {
            (*class, *meaning)
        });
    // A process killed in the middle of its work leaves channels that fault.
    if pid_was_killed && class == XidClass::Application {
        return (XidClass::ResultOfAKill, meaning);
    }
    (class, meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_driver() {
        // The first one as an H200 with driver 580.159.04 wrote it.
        let line = "NVRM: Xid (PCI:0000:00:06): 31, pid=462, name=python3, channel 0x0000000a, intr 00000000. MMU Fault: \
                    ENGINE GRAPHICS GPC1 GPCCLIENT_T1_8 faulted @ 0xdead_00000000. Fault is of type FAULT_PDE \
                    ACCESS_TYPE_VIRT_WRITE";
        let xid = parse(line, "kmsg").unwrap();
        assert_eq!((xid.bdf.as_str(), xid.xid, xid.pid), ("0000:00:06.0", 31, Some(462)));
        assert_eq!(xid.name.as_deref(), Some("python3"));
        assert!(xid.message.starts_with("pid=462, name=python3, channel"), "{}", xid.message);
        for (line, bdf, number, pid, name) in [
            ("NVRM: Xid (PCI:0000:D8:00): 79, GPU has fallen off the bus.", "0000:d8:00.0", 79, None, None),
            ("NVRM: Xid (PCI:0000:06:00): 13, pid='<unknown>', name=<unknown>, x", "0000:06:00.0", 13, None, None),
            ("NVRM: Xid (PCI:0000:06:00): 45, pid=0, name=x", "0000:06:00.0", 45, None, Some("x")),
            ("NVRM: Xid (0000:03:00): 43, Ch 00000008", "0000:03:00.0", 43, None, None),
            ("NVRM: Xid (03:00): 8", "0000:03:00.0", 8, None, None),
            ("Xid (PCI:0001:c1:00.1): 31, pid=7, name=a, b", "0001:c1:00.1", 31, Some(7), Some("a")),
        ] {
            let xid = parse(line, "kmsg").unwrap_or_else(|| panic!("{line}"));
            let found = (xid.bdf.as_str(), xid.xid, xid.pid, xid.name.as_deref());
            assert_eq!(found, (bdf, number, pid, name), "{line}");
        }
        for line in
            ["", "NVRM: loading", "NVRM: Xid (", "NVRM: Xid (PCI:x): 31", "NVRM: Xid (PCI:0000:06:00): x", "Xid (é): 3"]
        {
            assert_eq!(parse(line, "kmsg"), None, "{line}");
        }
    }

    #[test]
    fn classes() {
        for (xid, killed, class) in [
            (31, false, XidClass::Application),
            (31, true, XidClass::ResultOfAKill),
            (45, false, XidClass::ResultOfAKill),
            (79, true, XidClass::Hardware),
            (119, false, XidClass::Driver),
            (9_999, true, XidClass::Unknown),
        ] {
            assert_eq!(classify(xid, killed).0, class, "{xid}");
        }
        assert!(CATALOGUE.is_sorted_by_key(|(number, ..)| *number));
    }

    proptest::proptest! {
        #[test]
        fn any_line_is_survived(line in "(NVRM: )?(Xid \\()?(PCI:)?\\PC{0,40}(\\): )?[0-9]{0,12}\\PC{0,40}") {
            parse(&line, "kmsg");
        }
    }
}
