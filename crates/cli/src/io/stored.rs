//! A tensor as a file holds it, and how its name and its errors are shown.

use fulgurite::Tensor;
use std::collections::BTreeMap;

/// A tensor as a file holds it.
#[derive(Debug, Clone, PartialEq)]
pub enum Stored {
    /// One of the types we compute with; 64-bit integers that fit arrive as 32-bit ones.
    Tensor(Tensor),
    /// Of another type, which is kept for the message.
    Other(String),
}

/// The tensors of a file by name.
pub type Tensors = BTreeMap<String, Stored>;

/// Characters of a name that are shown.
const MAX_NAME: usize = 120;

/// A name out of a file as it may be shown: a terminal would take control characters for commands.
pub(crate) fn plain(name: &str) -> String {
    let mut shown: String = name.chars().take(MAX_NAME).flat_map(Shown::new).collect();
    if name.chars().nth(MAX_NAME).is_some() {
        shown.push_str("...");
    }
    shown
}

/// A character, or its escape.
enum Shown {
    Itself(Option<char>),
    Escaped(std::char::EscapeDefault),
}

impl Shown {
    fn new(c: char) -> Shown {
        // Marks that turn the order of writing are no control characters, and forge lines all the same.
        let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || turns { Shown::Escaped(c.escape_default()) } else { Shown::Itself(Some(c)) }
    }
}

impl Iterator for Shown {
    type Item = char;
    fn next(&mut self) -> Option<char> {
        match self {
            Shown::Itself(c) => c.take(),
            Shown::Escaped(all) => all.next(),
        }
    }
}

/// The error, with a hint for the usual cases.
pub(crate) fn reason(e: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match e.kind() {
        ErrorKind::NotFound => "no such file or folder; check the path".into(),
        ErrorKind::PermissionDenied => "permission denied; check who owns it".into(),
        _ => e.to_string(),
    }
}

/// 64-bit integers as a tensor of 32-bit ones, if they fit.
pub(crate) fn narrow(values: impl ExactSizeIterator<Item = i64>, shape: &[usize]) -> Result<Stored, String> {
    let narrowed: Result<Vec<i32>, _> = values.map(i32::try_from).collect();
    match narrowed {
        Ok(values) => Ok(Stored::Tensor(Tensor::new(values, shape).map_err(|e| e.to_string())?)),
        Err(_) => Ok(Stored::Other("i64 with values beyond 32 bits".into())),
    }
}
