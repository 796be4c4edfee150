//! Block skipping as text: `window:128:16,lambda:1e-3,tile:64x64`.

use crate::skip::{HeadClass, Lambda, Proxy, Skip};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// A part of a description that has no meaning.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "`skip` has {part:?}, allowed: dense, log, window:KEYS, window:KEYS:SINKS, mass:SHARE, top:SHARE (either with :SIMILARITY), \
     lambda:X, lambda-per-key:X, tile:ROWSxKEYS, no-first-tile, separated by commas; a class may be repeated as in dense*3"
)]
pub struct SkipTextError {
    part: String,
}

/// Parses the output of [`Display`](fmt::Display). Classes come in the order of heads.
///
/// ```
/// use fulgurite_core::skip::{HeadClass, Skip};
/// let skip: Skip = "window:128:16,dense*2,lambda:0.001,tile:64x32".parse()?;
/// assert_eq!(skip.classes[1..], [HeadClass::Dense; 2]);
/// assert_eq!(skip.to_string(), "window:128:16,dense*2,lambda:0.001,tile:64x32");
/// assert!("window".parse::<Skip>().is_err());
/// # Ok::<(), fulgurite_core::skip::SkipTextError>(())
/// ```
impl FromStr for Skip {
    type Err = SkipTextError;

    fn from_str(text: &str) -> Result<Skip, SkipTextError> {
        let mut skip = Skip { classes: Vec::new(), ..Skip::default() };
        for part in text.split(',').map(str::trim) {
            read(&mut skip, part).ok_or_else(|| SkipTextError { part: part.into() })?;
        }
        if skip.classes.is_empty() {
            skip.classes.push(HeadClass::Dense);
        }
        Ok(skip)
    }
}

/// Largest number of heads in one description; more are a typing error.
const MOST_HEADS: usize = 1 << 16;

fn read(skip: &mut Skip, part: &str) -> Option<()> {
    let (class, count) = match part.split_once('*') {
        Some((class, count)) => (class, count.parse().ok().filter(|n| (1..=MOST_HEADS).contains(n))?),
        None => (part, 1),
    };
    let words: Vec<&str> = class.split(':').collect();
    let found = match words[..] {
        ["dense"] => Some(HeadClass::Dense),
        ["log"] => Some(HeadClass::Log),
        ["window", keys] => Some(HeadClass::Window { keys: keys.parse().ok()?, sinks: 0 }),
        ["window", keys, sinks] => Some(HeadClass::Window { keys: keys.parse().ok()?, sinks: sinks.parse().ok()? }),
        _ => None,
    };
    if let Some(class) = found {
        skip.classes.extend(std::iter::repeat_n(class, count));
        return (skip.classes.len() <= MOST_HEADS).then_some(());
    }
    if part.contains('*') {
        return None;
    }
    let share = |words: &[&str], usual: f32| -> Option<(f32, f32)> {
        let similarity = words.get(1).map_or(Some(usual), |x| x.parse().ok())?;
        Some((words[0].parse().ok()?, similarity)).filter(|_| words.len() <= 2)
    };
    match words[..] {
        ["mass", ref rest @ ..] if !rest.is_empty() => {
            let (mass, similarity) = share(rest, 0.6)?;
            skip.proxy = Some(Proxy::Mass { mass, similarity });
        }
        ["top", ref rest @ ..] if !rest.is_empty() => {
            let (share, similarity) = share(rest, -0.1)?;
            skip.proxy = Some(Proxy::Top { share, similarity });
        }
        ["lambda", x] => skip.lambda = Some(Lambda::Fixed(x.parse().ok()?)),
        ["lambda-per-key", x] => skip.lambda = Some(Lambda::PerKey(x.parse().ok()?)),
        ["tile", size] => {
            let (rows, keys) = size.split_once('x')?;
            skip.tile = [rows.parse().ok()?, keys.parse().ok()?];
        }
        ["no-first-tile"] => skip.first_tile = false,
        _ => return None,
    }
    Some(())
}

impl fmt::Display for HeadClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeadClass::Dense => f.write_str("dense"),
            HeadClass::Window { keys, sinks } => write!(f, "window:{keys}:{sinks}"),
            HeadClass::Log => f.write_str("log"),
        }
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts: Vec<String> = Vec::new();
        for run in self.classes.chunk_by(|a, b| a == b) {
            parts.push(if run.len() == 1 { run[0].to_string() } else { format!("{}*{}", run[0], run.len()) });
        }
        parts.extend(match self.proxy {
            Some(Proxy::Mass { mass, similarity }) => Some(format!("mass:{mass}:{similarity}")),
            Some(Proxy::Top { share, similarity }) => Some(format!("top:{share}:{similarity}")),
            None => None,
        });
        parts.extend(match self.lambda {
            Some(Lambda::Fixed(x)) => Some(format!("lambda:{x}")),
            Some(Lambda::PerKey(x)) => Some(format!("lambda-per-key:{x}")),
            None => None,
        });
        parts.push(format!("tile:{}x{}", self.tile[0], self.tile[1]));
        parts.extend((!self.first_tile).then(|| "no-first-tile".to_string()));
        f.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back() {
        for text in [
            "dense,tile:128x64",
            "log,mass:0.98:0.6,tile:128x64,no-first-tile",
            "window:128:16*2,dense,top:0.5:-0.1,lambda-per-key:5,tile:64x128",
            "window:1:0,lambda:0.000001,tile:16x16",
        ] {
            assert_eq!(text.parse::<Skip>().unwrap().to_string(), text);
        }
        assert_eq!("lambda:1e-3".parse::<Skip>().unwrap().classes, [HeadClass::Dense]);
        assert_eq!("window:128".parse::<Skip>().unwrap().classes, [HeadClass::Window { keys: 128, sinks: 0 }]);
    }

    #[test]
    fn what_says_nothing_is_named() {
        for part in [
            "",
            "dens",
            "window",
            "window:-1",
            "window:1:2:3",
            "mass",
            "mass:x",
            "top:1:2:3",
            "lambda",
            "tile:64",
            "tile:axb",
            "dense*0",
            "dense*99999999",
            "lambda:1*2",
            "no-first-tile:1",
        ] {
            let refused = format!("dense,{part}").parse::<Skip>().unwrap_err().to_string();
            assert!(
                refused.starts_with(&format!("`skip` has {part:?}, allowed: dense, log, window:KEYS")),
                "{refused}"
            );
        }
    }
}
