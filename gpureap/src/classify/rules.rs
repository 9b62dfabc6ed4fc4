//! Rules as they are written, checked when they are read.

use std::{
    borrow::Cow,
    path::Path,
    sync::{LazyLock, OnceLock},
};

use glob::{MatchOptions, Pattern};
use serde::{Deserialize, Deserializer, de::Error as _};

use super::{Class, ClassInput, DEFAULT_RULE, Trust};
use crate::{
    choose::wish::{COMM_MAX, NO_USER},
    process::ContainerNames,
};

/// Ids below are the system's own (`SYS_UID_MAX` of login.defs is 999 on every common distribution).
const FIRST_USER: u32 = 1000;

/// A `*` does not reach over a `/`.
const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

/// A pattern, compiled when a text first begins as it does.
#[derive(Clone, Debug)]
struct Lazy {
    text: Cow<'static, str>,
    compiled: OnceLock<Option<Pattern>>,
}

impl PartialEq for Lazy {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Lazy {}

impl Lazy {
    const fn new(text: Cow<'static, str>) -> Self {
        Self { text, compiled: OnceLock::new() }
    }

    fn fits(&self, text: &str) -> bool {
        let special = self.text.find(['*', '?', '[']).unwrap_or(self.text.len());
        // Of hundreds of patterns all but a few end here.
        if !text.starts_with(&self.text[..special]) {
            return false;
        }
        let compiled = self.compiled.get_or_init(|| Pattern::new(&self.text).ok());
        compiled.as_ref().is_some_and(|pattern| pattern.matches_with(text, OPTIONS))
    }
}

/// One pattern, or several of which any may fit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Patterns(Vec<Lazy>);

impl Patterns {
    fn fit(&self, text: &str) -> bool {
        self.0.iter().any(|pattern| pattern.fits(text))
    }

    fn fit_some(&self, text: Option<&String>) -> bool {
        text.is_some_and(|text| self.fit(text))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum User {
    Id(u32),
    /// Compared with the name that the id has, so that an unknown name is no error.
    Name(String),
    /// `"system"`: ids below 1000.
    System,
}

impl User {
    fn named(name: String) -> Self {
        if name == "system" { Self::System } else { Self::Name(name) }
    }
}

/// One rule. All conditions that it has must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub name: String,
    pub class: Class,
    exe: Option<Patterns>,
    unit: Option<Patterns>,
    comm: Option<Patterns>,
    uid: Option<Vec<User>>,
    image: Option<Patterns>,
    container: Option<Patterns>,
    pod: Option<Patterns>,
    namespace: Option<Patterns>,
}

impl Rule {
    /// Whether it speaks of containers.
    const fn is_of_containers(&self) -> bool {
        self.image.is_some() || self.container.is_some() || self.pod.is_some() || self.namespace.is_some()
    }

    /// Whether a program's path, believed or not, is one of the rule's.
    pub(super) fn names_program(&self, exe: &Path) -> bool {
        self.exe.as_ref().is_some_and(|patterns| exe.to_str().is_some_and(|exe| patterns.fit(exe)))
    }

    pub(super) fn fits(&self, input: &ClassInput) -> bool {
        let Self { name: _, class, exe, unit, comm, uid, image, container, pod, namespace } = self;
        let ClassInput {
            comm: own_comm,
            uid: own_uid,
            user,
            exe: own_exe,
            trust,
            unit: own_unit,
            system_unit,
            contained,
            container: ContainerNames { name: own_name, image: own_image, pod: own_pod, namespace: own_namespace },
        } = input;
        // Whoever makes himself a job harms nobody else, so what he says may be believed.
        let believed = *class == Class::Job;
        let trusted = believed
            || match trust {
                Trust::None => false,
                Trust::Host => !contained,
                Trust::Container => self.is_of_containers(),
            };
        let has_id = |wanted: &User| match wanted {
            User::Id(id) => *own_uid == Some(*id),
            User::Name(name) => user.as_ref() == Some(name),
            User::System => own_uid.is_some_and(|id| id < FIRST_USER),
        };
        let unit_fits = |patterns: &Patterns| {
            patterns.fit_some(system_unit.as_ref()) || believed && patterns.fit_some(own_unit.as_ref())
        };
        let program = own_exe.as_deref();
        (exe.is_none() || trusted && program.is_some_and(|exe| self.names_program(exe)))
            && unit.as_ref().is_none_or(unit_fits)
            && comm.as_ref().is_none_or(|patterns| patterns.fit(own_comm))
            && uid.as_ref().is_none_or(|users| users.iter().any(has_id))
            && image.as_ref().is_none_or(|patterns| patterns.fit_some(own_image.as_ref()))
            && container.as_ref().is_none_or(|patterns| patterns.fit_some(own_name.as_ref()))
            && pod.as_ref().is_none_or(|patterns| patterns.fit_some(own_pod.as_ref()))
            && namespace.as_ref().is_none_or(|patterns| patterns.fit_some(own_namespace.as_ref()))
    }

    fn check(self) -> Result<Self, String> {
        let Self { name, class, exe, unit, comm, uid, image, container, pod, namespace } = &self;
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || !name.chars().all(plain) {
            return Err(format!("a rule's name has small letters, digits and dashes: `{name}`"));
        }
        if name == "all" || name == DEFAULT_RULE {
            return Err(format!("`{name}` has a meaning of its own and names no rule"));
        }
        if let Some(exe) = exe.iter().flat_map(|patterns| &patterns.0).find(|exe| !exe.text.starts_with('/')) {
            return Err(format!("exe `{}` is not an absolute path", exe.text));
        }
        can_fit(unit.as_ref(), comm.as_ref(), uid.as_deref())?;
        let hints = [comm, container, pod].iter().any(|patterns| patterns.is_some());
        let proofs = [exe, unit, image, namespace].iter().any(|patterns| patterns.is_some()) || uid.is_some();
        if !hints && !proofs {
            return Err(format!("the rule `{name}` has no condition"));
        }
        if *class != Class::Job && !proofs {
            let class = class.name();
            return Err(format!(
                "whoever runs a process can choose what the rule `{name}` asks for: class `{class}` needs exe, unit, uid, image or namespace too"
            ));
        }
        Ok(self)
    }
}

/// Refuses what no process can ever fit: whoever wrote it believes that it does something.
fn can_fit(unit: Option<&Patterns>, comm: Option<&Patterns>, uid: Option<&[User]>) -> Result<(), String> {
    let texts = |patterns: Option<&Patterns>| -> Vec<String> {
        patterns.iter().flat_map(|patterns| &patterns.0).map(|pattern| pattern.text.to_string()).collect()
    };
    if let Some(unit) = texts(unit).iter().find(|unit| unit.contains('/')) {
        return Err(format!("unit `{unit}` fits nothing: the name of a unit has no `/`"));
    }
    // Of a set in brackets one character is meant, however long it is written.
    let least = |comm: &String| if comm.contains('[') { 0 } else { comm.bytes().filter(|byte| *byte != b'*').count() };
    if let Some(comm) = texts(comm).iter().find(|comm| least(comm) > COMM_MAX) {
        return Err(format!("comm `{comm}` fits nothing: the kernel keeps {COMM_MAX} bytes of a process's name"));
    }
    match uid {
        Some([]) => Err("a list of users that is empty fits nothing".to_owned()),
        Some(users) if users.contains(&User::Name(String::new())) => Err("a user's name is not empty".to_owned()),
        Some(users) if users.contains(&User::Id(NO_USER)) => Err(format!("uid {NO_USER} is nobody's")),
        _ => Ok(()),
    }
}

impl<'de> Deserialize<'de> for Rule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let RawRule { name, class, exe, unit, comm, uid, image, container, pod, namespace } =
            RawRule::deserialize(deserializer)?;
        let uid = uid.map(|uid| match uid {
            RawUsers::One(user) => vec![user.user()],
            RawUsers::Several(users) => users.into_iter().map(RawUser::user).collect(),
        });
        Self { name, class, exe, unit, comm, uid, image, container, pod, namespace }.check().map_err(D::Error::custom)
    }
}

/// `[[class]]` in the configuration.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "a rule: a table [[class]]")]
struct RawRule {
    name: String,
    class: Class,
    #[serde(default, deserialize_with = "of::exe")]
    exe: Option<Patterns>,
    #[serde(default, deserialize_with = "of::unit")]
    unit: Option<Patterns>,
    #[serde(default, deserialize_with = "of::comm")]
    comm: Option<Patterns>,
    uid: Option<RawUsers>,
    #[serde(default, deserialize_with = "of::image")]
    image: Option<Patterns>,
    #[serde(default, deserialize_with = "of::container")]
    container: Option<Patterns>,
    #[serde(default, deserialize_with = "of::pod")]
    pod: Option<Patterns>,
    #[serde(default, deserialize_with = "of::namespace")]
    namespace: Option<Patterns>,
}

/// Reads the patterns of one key, so that a mistake names it.
macro_rules! keys {
    ($($key:ident),*) => {
        mod of {
            use super::{Deserializer, Patterns, patterns};
            $(pub(super) fn $key<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Patterns>, D::Error> {
                patterns(stringify!($key), deserializer).map(Some)
            })*
        }
    };
}

keys!(exe, unit, comm, image, container, pod, namespace);

#[derive(Deserialize)]
#[serde(untagged, expecting = "`uid` must be a number, a user's name or \"system\", or a list of them")]
enum RawUsers {
    One(RawUser),
    Several(Vec<RawUser>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RawUser {
    Id(u32),
    Name(String),
}

impl RawUser {
    fn user(self) -> User {
        match self {
            Self::Id(id) => User::Id(id),
            Self::Name(name) => User::named(name),
        }
    }
}

fn patterns<'de, D: Deserializer<'de>>(key: &str, deserializer: D) -> Result<Patterns, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Raw {
        One(String),
        Several(Vec<String>),
    }
    let wrong = |what: &str| D::Error::custom(format!("`{key}` {what}"));
    let list = match Raw::deserialize(deserializer) {
        Ok(Raw::One(pattern)) => vec![pattern],
        Ok(Raw::Several(patterns)) => patterns,
        Err(_) => return Err(wrong("must be a pattern or a list of patterns, as text in quotes")),
    };
    if list.is_empty() {
        return Err(wrong("is a list without patterns and fits nothing"));
    }
    let pattern = |text: String| match Pattern::new(&text) {
        // A process may have an empty name.
        Ok(_) if text.is_empty() && key != "comm" => Err(wrong("has an empty pattern, which fits nothing")),
        Ok(_) => Ok(Lazy::new(text.into())),
        Err(error) => Err(wrong(&format!("has the pattern `{text}`: {error}"))),
    };
    list.into_iter().map(pattern).collect::<Result<_, _>>().map(Patterns)
}

/// The rules in the order in which they are asked: a user's, then the shipped ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

/// A rule of `rules.toml`; what it does not ask for is empty.
struct Shipped {
    name: &'static str,
    class: Class,
    exe: &'static [&'static str],
    unit: &'static [&'static str],
    comm: &'static [&'static str],
    uid: &'static [&'static str],
    image: &'static [&'static str],
    container: &'static [&'static str],
    pod: &'static [&'static str],
    namespace: &'static [&'static str],
}

/// Made by build.rs.
const SHIPPED: &[Shipped] = include!(concat!(env!("OUT_DIR"), "/shipped_rules.rs"));

static SHIPPED_RULES: LazyLock<Vec<Rule>> = LazyLock::new(|| SHIPPED.iter().map(Shipped::rule).collect());

impl Shipped {
    fn rule(&self) -> Rule {
        let Self { name, class, exe, unit, comm, uid, image, container, pod, namespace } = self;
        let patterns = |texts: &'static [&'static str]| {
            let list: Vec<Lazy> = texts.iter().map(|text| Lazy::new(Cow::Borrowed(text))).collect();
            (!list.is_empty()).then_some(Patterns(list))
        };
        let users = || uid.iter().map(|name| User::named((*name).to_owned())).collect();
        Rule {
            name: (*name).to_owned(),
            class: *class,
            exe: patterns(exe),
            unit: patterns(unit),
            comm: patterns(comm),
            uid: (!uid.is_empty()).then(users),
            image: patterns(image),
            container: patterns(container),
            pod: patterns(pod),
            namespace: patterns(namespace),
        }
    }
}

impl Rules {
    /// A user's rules before the shipped ones.
    pub const fn with(own: Vec<Rule>) -> Self {
        Self(own)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.0.iter().chain(SHIPPED_RULES.iter())
    }

    /// Whether there is a rule of that name, so that a mistyped one can be told.
    pub fn has(&self, name: &str) -> bool {
        self.iter().any(|rule| rule.name == name)
    }
}
