//! The command `fulgurite`.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    fulgurite_cli::main(std::env::args_os())
}
