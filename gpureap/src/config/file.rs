//! The file as it is written: its tables, and the values that are checked while they are read.

use std::{
    collections::BTreeMap, fmt, marker::PhantomData, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration,
};

use hyper::Uri;
use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};

use super::{Variable, duration};
use crate::classify::Rule;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a configuration")]
pub(super) struct RawConfig {
    #[serde(default, deserialize_with = "tables")]
    pub(super) device: Vec<toml::Spanned<RawDevice>>,
    #[serde(default)]
    pub(super) daemon: RawDaemon,
    #[serde(default)]
    pub(super) maps: RawMaps,
    #[serde(default)]
    pub(super) nvml: RawNvml,
    #[serde(default)]
    pub(super) journal: RawJournal,
    #[serde(default)]
    pub(super) metrics: RawMetrics,
    pub(super) otlp: Option<RawOtlp>,
    #[serde(default, deserialize_with = "tables")]
    pub(super) class: Vec<Rule>,
}

/// A list of tables. One in single brackets is a likely mistake.
fn tables<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Tables<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Tables<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("tables in double brackets, such as [[device]]")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut tables = Vec::new();
            while let Some(table) = list.next_element()? {
                tables.push(table);
            }
            Ok(tables)
        }
    }

    deserializer.deserialize_seq(Tables(PhantomData))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a device: a table [[device]]")]
pub(super) struct RawDevice {
    pub(super) kind: RawKind,
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) node: PathBuf,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum RawKind {
    Standin,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [daemon]")]
pub(super) struct RawDaemon {
    pub(super) sweep_period: Option<Period<1_000>>,
    pub(super) loss_poll: Option<Period<10>>,
    pub(super) socket: Option<bool>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [maps]")]
pub(super) struct RawMaps {
    pub(super) files: Option<MapSize>,
    pub(super) holders: Option<MapSize>,
    pub(super) tables: Option<MapSize>,
    pub(super) procs: Option<MapSize>,
    pub(super) lineage: Option<MapSize>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [nvml]")]
pub(super) struct RawNvml {
    pub(super) enabled: Option<bool>,
    pub(super) library: Option<Library>,
    pub(super) timeout: Option<Period<10>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawJournal {
    pub(super) enabled: Option<bool>,
    pub(super) max_age: Option<Age>,
    pub(super) max_size: Option<Size>,
    pub(super) environment: Option<Vec<Variable>>,
    pub(super) heartbeat: Option<Period<1_000>>,
    pub(super) memory_period: Option<PeriodOrOff>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [metrics]")]
pub(super) struct RawMetrics {
    pub(super) listen: Option<Listen>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table [otlp]")]
pub(super) struct RawOtlp {
    pub(super) endpoint: Option<Endpoint>,
    #[serde(default)]
    pub(super) headers: BTreeMap<HeaderText, HeaderText>,
}

/// Where a receiver listens.
pub(super) struct Endpoint(pub(super) Uri);

impl<'de> Deserialize<'de> for Endpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.starts_with("https:") {
            let told = format!("`{text}` wants TLS, which a collector on this host does: give its http address");
            return Err(serde::de::Error::custom(told));
        }
        // What stands before an `@` is a password, which would be told with the address.
        let is_bare = |uri: &Uri| uri.authority().is_some_and(|authority| !authority.as_str().contains('@'));
        let fits = |uri: &Uri| uri.scheme_str() == Some("http") && is_bare(uri) && uri.query().is_none();
        let uri = text.parse::<Uri>().ok().filter(fits);
        uri.map(Self).ok_or_else(|| {
            serde::de::Error::custom(format!("`{text}` is not an address such as http://127.0.0.1:4318"))
        })
    }
}

/// A header's name or value.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HeaderText(pub(super) String);

impl<'de> Deserialize<'de> for HeaderText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.is_empty() || !text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
            return Err(serde::de::Error::custom("a header has a name and a value of printable ASCII"));
        }
        Ok(Self(text))
    }
}

/// Where to listen. Names are not looked up: what answers for them could change, or not answer.
pub(super) struct Listen(pub(super) SocketAddr);

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = || format!("`{text}` is not an address with a port such as 127.0.0.1:9840 or [::1]:9840");
        text.parse().map(Self).map_err(|_| serde::de::Error::custom(wrong()))
    }
}

impl<'de> Deserialize<'de> for Variable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let name = text.strip_suffix('*').unwrap_or(&text);
        // A `*` alone would keep everybody's passwords.
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            let message =
                format!("`{text}` is not the name of a variable, nor the beginning of one with a * behind it");
            return Err(serde::de::Error::custom(message));
        }
        Ok(Self(text))
    }
}

/// How long something is kept.
pub(super) struct Age(pub(super) Duration);

impl<'de> Deserialize<'de> for Age {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let age = duration(&text).map_err(serde::de::Error::custom)?;
        let (min, max) = (Duration::from_hours(1), Duration::from_hours(24 * 3650));
        if age < min || age > max {
            return Err(serde::de::Error::custom(format!("`{text}` is not between 1h and 3650d")));
        }
        Ok(Self(age))
    }
}

/// A number of bytes, such as `1GiB` or `500 MB`.
pub(super) struct Size(pub(super) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.len() - text.trim_start_matches(|char: char| char.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let unit: u64 = match unit.trim() {
            "" | "B" => 1,
            "kB" => 1000,
            "KiB" => 1 << 10,
            "MB" => 1_000_000,
            "MiB" => 1 << 20,
            "GB" => 1_000_000_000,
            "GiB" => 1 << 30,
            "TB" => 1_000_000_000_000,
            "TiB" => 1 << 40,
            _ => return Err(format!("`{text}` is not a size such as 1GiB, 500MB or 1048576")),
        };
        let number: u64 =
            number.parse().map_err(|_| format!("`{text}` is not a size such as 1GiB, 500MB or 1048576"))?;
        let bytes = number.saturating_mul(unit);
        // Less would not hold what a busy host has open.
        if !((1 << 20)..=(1 << 50)).contains(&bytes) {
            return Err(format!("`{text}` is not between 1MiB and 1024TiB"));
        }
        Ok(Self(bytes))
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match toml::Value::deserialize(deserializer)? {
            toml::Value::String(text) => text.parse(),
            toml::Value::Integer(bytes) => bytes.to_string().parse(),
            _ => Err("a size is a number of bytes, or a string such as \"1GiB\"".to_owned()),
        }
        .map_err(serde::de::Error::custom)
    }
}

/// `off`, or a length of time.
pub(super) struct PeriodOrOff(pub(super) Option<Duration>);

impl<'de> Deserialize<'de> for PeriodOrOff {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::{IntoDeserializer as _, value::StringDeserializer};
        let text = String::deserialize(deserializer)?;
        if text == "off" {
            return Ok(Self(None));
        }
        let text: StringDeserializer<D::Error> = text.into_deserializer();
        Period::<1_000>::deserialize(text).map(|period| Self(Some(period.0)))
    }
}

/// What the loader looks for: a name in its own places, or an absolute path. A relative path would depend on where
/// gpureap is started.
pub(super) struct Library(pub(super) PathBuf);

impl<'de> Deserialize<'de> for Library {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.is_empty() || text.contains('\0') || text.contains('/') && !text.starts_with('/') {
            return Err(serde::de::Error::custom(format!("`{text}` is neither a name nor an absolute path")));
        }
        Ok(Self(text.into()))
    }
}

/// A length of time: at least `MIN` milliseconds, at most a day.
pub(super) struct Period<const MIN: u64>(pub(super) Duration);

impl<'de, const MIN: u64> Deserialize<'de> for Period<MIN> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let period = duration(&text).map_err(serde::de::Error::custom)?;
        let (min, max) = (Duration::from_millis(MIN), Duration::from_hours(24));
        if period < min || period > max {
            return Err(serde::de::Error::custom(format!("`{text}` is not between {min:?} and 24h")));
        }
        Ok(Self(period))
    }
}

/// Entries of a kernel map: below the least, a busy host overflows at once; above the most, the memory is a mistake.
pub(super) struct MapSize(pub(super) u32);

impl<'de> Deserialize<'de> for MapSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (min, max) = (64, 1 << 22);
        let entries = i64::deserialize(deserializer)?;
        u32::try_from(entries)
            .ok()
            .filter(|entries| (min..=max).contains(entries))
            .map(Self)
            .ok_or_else(|| serde::de::Error::custom(format!("{entries} is not between {min} and {max} entries")))
    }
}
