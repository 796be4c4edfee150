//! Python environments under the target folder, the extension built into its package, and its tests.

use crate::steps::{Trouble, must, works};
use crate::{root, target};
use std::path::{Path, PathBuf};
use std::process::Command;

const FOR_TESTS: &[&str] = &["numpy", "pytest"];
const FOR_TORCH: &[&str] = &[
    "numpy",
    "pytest",
    "torch",
    "transformers",
    "jax",
    "scikit-learn",
    "hdbscan",
    "ray[data]",
    "ring-flash-attn",
    "yunchang",
];
const FOR_WHEELS: &[&str] = &["maturin>=1.16,<2"];
/// A wheel that is larger was built with something that does not belong in it.
const WHEEL_BYTES: u64 = 10_000_000;
/// NVIDIA's assembler and disassembler; what they could also use (a compiler, a runtime) is not asked for.
const FOR_KERNELS: &[&str] = &["--no-deps", "nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-nvdisasm==13.4.92"];
const FOR_PEERS: &[&str] = &["--requirement", "bench/requirements.txt"];

/// Tests that need nothing large; those that ask for more skip themselves.
pub fn tests() -> Result<(), Trouble> {
    let python = environment("venv", FOR_TESTS)?;
    extension(&python)?;
    must(&mut pytest(&python))
}

/// Builds the wheel, and tests it where nothing but NumPy is installed beside it.
pub fn wheel_tests() -> Result<(), Trouble> {
    let wheel = wheel()?;
    // Made anew: that it installs into an empty environment is what is tested.
    let _ = std::fs::remove_file(target().join("venv-wheel").join("installed"));
    let python = environment("venv-wheel", FOR_TESTS)?;
    install(&python, &wheel)?;
    must(&mut pytest_installed(&python))
}

/// All tests, on the wheel that [`wheel_tests`] built, with PyTorch and transformers to compare with.
pub fn torch_tests() -> Result<(), Trouble> {
    let wheel = wheel()?;
    let python = environment("venv-long", FOR_TORCH)?;
    install(&python, &wheel)?;
    must(pytest_installed(&python).env("FULGURITE_LONG", "1"))
}

/// The wheel, built by maturin.
fn wheel() -> Result<PathBuf, Trouble> {
    let python = environment("venv-maturin", FOR_WHEELS)?;
    let folder = target().join("wheels");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(Trouble::fail)?;
    }
    let build = ["-m", "maturin", "build", "--release", "--quiet", "--manifest-path", "python/Cargo.toml", "--out"];
    must(command(&python).args(build).arg(&folder))?;
    let mut found = std::fs::read_dir(&folder).map_err(Trouble::fail)?.filter_map(Result::ok);
    let wheel = found.next().ok_or_else(|| Trouble::fail("maturin left no wheel"))?;
    let bytes = wheel.metadata().map_err(Trouble::fail)?.len();
    println!("{}: {bytes} bytes", wheel.file_name().to_string_lossy());
    if bytes > WHEEL_BYTES {
        return Err(Trouble::fail(format!("the wheel has {bytes} bytes, allowed: {WHEEL_BYTES}")));
    }
    Ok(wheel.path())
}

fn install(python: &Path, wheel: &Path) -> Result<(), Trouble> {
    let install = ["-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps"];
    must(command(python).args(install).arg(wheel))
}

/// A Python with every peer of the comparison; the comparison builds our extension itself.
pub fn with_peers() -> Result<PathBuf, Trouble> {
    environment("venv-bench", FOR_PEERS)
}

/// The assembler of GPU kernels, from the package index; skips where it cannot be had.
pub fn assembler() -> Result<PathBuf, Trouble> {
    let python = environment("venv-kernels", FOR_KERNELS).map_err(|trouble| match trouble {
        Trouble::Fail(why) => Trouble::Skip(format!("the package index does not give the assembler: {why}")),
        skip => skip,
    })?;
    let find = "import importlib.metadata as m; \
                print(next(f.locate() for f in m.files('nvidia-cuda-nvcc') if f.name in ('ptxas', 'ptxas.exe')))";
    let output = command(&python).args(["-c", find]).output().map_err(Trouble::fail)?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    if !works(Command::new(&path).arg("--version")) {
        return Err(Trouble::skip(format!("`{}` does not run on this machine", path.display())));
    }
    Ok(path)
}

/// A command that sees our package.
pub fn command(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.current_dir(root()).env("PYTHONPATH", root().join("python"));
    command
}

fn pytest(python: &Path) -> Command {
    let mut command = command(python);
    command.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "python/tests"]);
    command
}

/// The same on the package that is installed, not on the one in this checkout.
fn pytest_installed(python: &Path) -> Command {
    let mut command = pytest(python);
    command.env_remove("PYTHONPATH").env("FULGURITE_INSTALLED", "1");
    command
}

/// The interpreter of a virtual environment that holds `packages`; made and filled the first time.
pub fn environment(name: &str, packages: &[&str]) -> Result<PathBuf, Trouble> {
    if !root().join("python").is_dir() {
        return Err(Trouble::skip("there is no python/ here"));
    }
    let supported = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))";
    if !works(Command::new("python3").args(["-c", supported])) {
        return Err(Trouble::skip("`python3` of version 3.10 or later with venv and pip was not found"));
    }
    let home = target().join(name);
    let python = home.join("bin").join("python");
    let stamp = home.join("installed");
    if std::fs::read_to_string(&stamp).is_ok_and(|have| have == packages.join(" ")) {
        return Ok(python);
    }
    must(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home))?;
    must(command(&python).args(["-m", "pip", "install", "--quiet"]).args(packages))?;
    std::fs::write(&stamp, packages.join(" ")).map_err(Trouble::fail)?;
    Ok(python)
}

/// Builds the extension and puts it where Python finds it.
fn extension(python: &Path) -> Result<(), Trouble> {
    // The profile and the features of the other tests, whose dependencies are there already; wheels are built for release.
    must(command(python).args(["python/build.py", "--debug", "--workspace", "--lib", "--examples"]))
}
