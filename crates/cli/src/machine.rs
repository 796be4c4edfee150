//! A description of this machine, as far as the system gives one.

use fulgurite::Isa;
use serde::Serialize;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// A machine.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// The processor's own name.
    pub cpu: String,
    /// `x86_64`, `aarch64`.
    pub arch: &'static str,
    /// `linux`, `macos`.
    pub os: &'static str,
    /// Cores this process may use.
    pub cores: usize,
    /// Caches of the first core, such as `L1d 48 KiB`.
    pub caches: Vec<String>,
    /// Main memory, if known.
    pub memory_bytes: Option<u64>,
    /// Instruction sets with kernels that this machine can run, fastest first.
    pub instruction_sets: Vec<&'static str>,
}

impl Machine {
    /// Looks around. What cannot be found out is left empty.
    pub fn look() -> Machine {
        Machine {
            cpu: cpu_name().unwrap_or_else(|| "unknown".into()),
            arch: std::env::consts::ARCH,
            os: std::env::consts::OS,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            caches: caches(),
            memory_bytes: memory_bytes(),
            instruction_sets: Isa::available().into_iter().map(Isa::name).collect(),
        }
    }

    /// One line for the head of a report.
    pub fn line(&self) -> String {
        let cores = if self.cores == 1 { "1 core".into() } else { format!("{} cores", self.cores) };
        let memory = self.memory_bytes.map(|bytes| format!(", {}", gibibytes(bytes))).unwrap_or_default();
        format!("{}, {cores}{memory}, {} {}", self.cpu, self.os, self.arch)
    }
}

/// Bytes in GiB with one digit.
pub fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.split_whitespace().collect::<Vec<_>>().join(" "))
    })
}

fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    ["model name", "Model", "Hardware"].into_iter().find_map(|name| field(&text, name)).filter(|name| !name.is_empty())
}

fn memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes: u64 = field(&text, "MemTotal")?.strip_suffix(" kB")?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

fn caches() -> Vec<String> {
    let mut found = Vec::new();
    for index in 0..8 {
        let read = |file: &str| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}");
            fs::read_to_string(path).ok().map(|text| text.trim().to_string())
        };
        let (Some(level), Some(kind), Some(size)) = (read("level"), read("type"), read("size")) else { continue };
        let letter = match kind.as_str() {
            "Data" => "d",
            "Instruction" => "i",
            _ => "",
        };
        found.push(format!("L{level}{letter} {}", size.replace('K', " KiB").replace('M', " MiB")));
    }
    found
}

/// The date and time in UTC, such as `2026-11-15 09:30 UTC`.
pub fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date(seconds)
}

fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, so that the leap day ends a year (Howard Hinnant, chrono-compatible date algorithms).
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", rest / 3600, rest / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_794_700_800), "2026-11-15 00:00 UTC");
    }

    #[test]
    fn looking_finds_something() {
        let machine = Machine::look();
        assert!(machine.cores >= 1);
        assert!(machine.instruction_sets.contains(&"portable"));
        assert!(!machine.line().is_empty());
    }
}
