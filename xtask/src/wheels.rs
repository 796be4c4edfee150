//! `cargo xtask wheel --all`: wheels for every platform that cross tools reach, each checked as far as this machine can.

use crate::python::{command, environment};
use crate::steps::{Report, Trouble, must, works};
use crate::{root, target};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds, checks and cross-compiles: all from the package index. Zig is the linker and brings the C libraries.
const TOOLS: &[&str] = &["maturin>=1.16,<2", "ziglang", "cargo-zigbuild", "twine", "auditwheel", "pyelftools"];

/// A wheel that is larger was built with something that does not belong in it.
const WHEEL_BYTES: u64 = 5_000_000;

/// How a platform is linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Linker {
    /// Zig, for this version of glibc or later.
    ZigLinux,
    /// Zig, with its own description of macOS's system library.
    ZigMacos,
    /// GCC for Windows.
    Mingw,
}

/// A platform that gets a wheel.
struct Platform {
    /// Rust's name of it.
    target: &'static str,
    linker: Linker,
}

const PLATFORMS: &[Platform] = &[
    Platform { target: "x86_64-unknown-linux-gnu", linker: Linker::ZigLinux },
    Platform { target: "aarch64-unknown-linux-gnu", linker: Linker::ZigLinux },
    Platform { target: "aarch64-apple-darwin", linker: Linker::ZigMacos },
    Platform { target: "x86_64-apple-darwin", linker: Linker::ZigMacos },
    Platform { target: "x86_64-pc-windows-gnu", linker: Linker::Mingw },
];

/// The oldest Linux that wheels run on.
const MANYLINUX: &str = "manylinux_2_28";

/// Builds all wheels, or those whose target contains `only`, into `target/wheels`.
pub fn run(report: &mut Report, only: Option<&str>) {
    for platform in PLATFORMS.iter().filter(|platform| only.is_none_or(|only| platform.target.contains(only))) {
        let mut built = None;
        report.step(&format!("wheel for {}", platform.target), || {
            let tools = environment("venv-wheels", TOOLS)?;
            let wheel = build(&tools, platform)?;
            check(&tools, platform, &wheel)?;
            built = Some(wheel);
            Ok(())
        });
        if let (Some(wheel), "aarch64-unknown-linux-gnu") = (built, platform.target) {
            report.step("the wheel for AArch64, imported under emulation", || import_emulated(&wheel));
        }
    }
}

fn build(python: &Path, platform: &Platform) -> Result<PathBuf, Trouble> {
    let &Platform { target: name, linker } = platform;
    if !works(Command::new("rustup").current_dir(root()).args(["target", "add", name])) {
        return Err(Trouble::skip(format!("`rustup target add {name}` does not work here")));
    }
    if linker == Linker::Mingw && !works(Command::new("x86_64-w64-mingw32-gcc").arg("--version")) {
        return Err(Trouble::skip(
            "no compiler for Windows was found; on Debian: apt-get install gcc-mingw-w64-x86-64",
        ));
    }
    let folder = target().join("wheels").join(name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(Trouble::fail)?;
    }
    let mut build = command(python);
    build.args(["-m", "maturin", "build", "--release", "--quiet", "--manifest-path", "python/Cargo.toml"]);
    build.args(["--target", name, "--out"]).arg(&folder);
    match linker {
        Linker::ZigLinux => build.args(["--zig", "--compatibility", MANYLINUX]),
        Linker::ZigMacos => build.arg("--zig"),
        Linker::Mingw => build.env("CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER", "x86_64-w64-mingw32-gcc"),
    };
    // maturin finds zig and cargo-zigbuild among the programs of its environment.
    let programs = python.parent().map(Path::to_path_buf).unwrap_or_default();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::iter::once(programs).chain(std::env::split_paths(&path));
    build.env("PATH", std::env::join_paths(paths).map_err(Trouble::fail)?);
    must(&mut build)?;
    let mut found = std::fs::read_dir(&folder).map_err(Trouble::fail)?.filter_map(Result::ok);
    Ok(found.next().ok_or_else(|| Trouble::fail("maturin left no wheel"))?.path())
}

fn check(python: &Path, platform: &Platform, wheel: &Path) -> Result<(), Trouble> {
    let bytes = wheel.metadata().map_err(Trouble::fail)?.len();
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    println!("{name}: {bytes} bytes");
    if bytes > WHEEL_BYTES {
        return Err(Trouble::fail(format!("{name} has {bytes} bytes, allowed: {WHEEL_BYTES}")));
    }
    must(command(python).args(["-m", "twine", "check", "--strict"]).arg(wheel))?;
    if platform.linker == Linker::ZigLinux {
        let mut show = command(python);
        show.args(["-m", "auditwheel", "show"]).arg(wheel);
        let output = show.output().map_err(Trouble::fail)?;
        let text = String::from_utf8_lossy(&output.stdout).replace('\n', " ");
        println!("{}", text.trim());
        // It names the oldest policy that the wheel keeps.
        let kept = ["manylinux_2_17", "manylinux_2_24", "manylinux_2_26", "manylinux_2_27", MANYLINUX];
        if !output.status.success() || !kept.iter().any(|policy| text.contains(policy)) {
            return Err(Trouble::fail(format!("{name} does not keep to {MANYLINUX}")));
        }
    }
    Ok(())
}

/// Python and what it loads, as packages of Debian.
const ARM_PACKAGES: &[&str] = &[
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "libexpat1",
    "zlib1g",
    "libffi8",
    "libssl3",
    "libbz2-1.0",
    "liblzma5",
    "libcrypt1",
    "libuuid1",
];

/// Imports the wheel and computes with it under qemu, in a Python for AArch64.
fn import_emulated(wheel: &Path) -> Result<(), Trouble> {
    for tool in ["qemu-aarch64", "dpkg-deb", "apt-get"] {
        if !works(Command::new(tool).arg("--version")) {
            return Err(Trouble::skip(format!("`{tool}` is not installed; the Python for AArch64 comes from Debian")));
        }
    }
    let home = target().join("aarch64-python");
    let (root, site) = (home.join("root"), home.join("site"));
    let interpreter = root.join("usr/bin/python3.11");
    if !interpreter.exists() {
        debian(&home, &root)?;
    }
    let _ = std::fs::remove_dir_all(&site);
    let python = environment("venv-wheels", TOOLS)?;
    let install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--only-binary",
        ":all:",
        "--python-version",
        "3.11",
        "--implementation",
        "cp",
    ];
    let platforms = ["--platform", MANYLINUX_ARM[0], "--platform", MANYLINUX_ARM[1], "--target"];
    must(command(&python).args(install).args(platforms).arg(&site).arg("numpy").arg(wheel))?;
    let program = "import numpy, platform, fulgurite; \
                   q = numpy.random.default_rng(0).standard_normal((1, 33, 4, 16), dtype=numpy.float32); \
                   s = numpy.einsum('bqhd,bkhd->bhqk', q, q) / 4; p = numpy.exp(s - s.max(-1, keepdims=True)); \
                   want = numpy.einsum('bhqk,bkhd->bqhd', p / p.sum(-1, keepdims=True), q); \
                   assert abs(fulgurite.attention(q, q, q) - want).max() < 1e-5; \
                   print(fulgurite.__version__, platform.machine(), fulgurite.engines())";
    must(
        Command::new("qemu-aarch64")
            .arg("-L")
            .arg(&root)
            .arg(&interpreter)
            .args(["-c", program])
            .env("PYTHONHOME", root.join("usr"))
            .env("PYTHONPATH", &site),
    )
}

const MANYLINUX_ARM: [&str; 2] = ["manylinux_2_28_aarch64", "manylinux_2_27_aarch64"];

/// Unpacks a Python for AArch64 below `root`, without touching the packages of this machine.
fn debian(home: &Path, root: &Path) -> Result<(), Trouble> {
    let (lists, cache) = (home.join("lists"), home.join("debs"));
    for folder in [&lists.join("partial"), &cache, &root.to_path_buf()] {
        std::fs::create_dir_all(folder).map_err(Trouble::fail)?;
    }
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        command.current_dir(&cache).args(["-q", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"]);
        command.arg("-o").arg(format!("Dir::State::lists={}", lists.display()));
        command.arg("-o").arg(format!("Dir::Cache={}", home.display()));
        command.arg("-o").arg("APT::Sandbox::User=root").args(words);
        command
    };
    if !works(&mut apt(&["update"])) {
        return Err(Trouble::skip("Debian's packages for arm64 cannot be had here"));
    }
    must(apt(&["download"]).args(ARM_PACKAGES))?;
    for deb in std::fs::read_dir(&cache).map_err(Trouble::fail)?.filter_map(Result::ok) {
        must(Command::new("dpkg-deb").arg("-x").arg(deb.path()).arg(root))?;
    }
    Ok(())
}
