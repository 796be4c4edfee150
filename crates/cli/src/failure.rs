//! Why the command fails, and with which exit code.

use std::fmt;

/// Why the command ends without success.
#[derive(Debug)]
pub enum Failure {
    /// The call or its input is wrong: exit code 2.
    Input(anyhow::Error),
    /// The work failed, or this machine lacks what it needs: exit code 1.
    Work(anyhow::Error),
    /// The reader of our output went away; nobody is left to be told.
    Closed,
}

impl Failure {
    /// A wrong call or wrong input.
    pub fn input(text: impl fmt::Display) -> Failure {
        Failure::Input(anyhow::anyhow!("{text}"))
    }

    /// Work that failed.
    pub fn work(text: impl fmt::Display) -> Failure {
        Failure::Work(anyhow::anyhow!("{text}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // One line, whatever the cause wrote.
            Failure::Input(e) | Failure::Work(e) => {
                f.write_str(&format!("{e:#}").split_whitespace().collect::<Vec<_>>().join(" "))
            }
            Failure::Closed => f.write_str("output closed"),
        }
    }
}

impl From<fulgurite::Error> for Failure {
    fn from(e: fulgurite::Error) -> Failure {
        use fulgurite::Error;
        match e {
            // The call is right; this machine cannot do it.
            Error::Device(_) | Error::Choice(fulgurite::ChoiceError::Isa { .. }) => Failure::Work(e.into()),
            _ => Failure::Input(e.into()),
        }
    }
}
