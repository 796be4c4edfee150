//! `completions` and `man`: what shells and readers of manuals get from the definition of the arguments.

use crate::args::{Args, CompletionsArgs, ManArgs};
use crate::{Failure, io, say};
use clap::CommandFactory;

/// Prints a shell's completion script.
pub fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "fulgurite", &mut script);
    say(&String::from_utf8_lossy(&script))
}

/// Writes `fulgurite.1` and a page for each subcommand.
pub fn pages(args: &ManArgs) -> Result<(), Failure> {
    let mut commands = vec![Args::command().disable_help_subcommand(true)];
    commands[0].build();
    let mut files = Vec::new();
    while let Some(command) = commands.pop() {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_string();
        commands.extend(command.get_subcommands().filter(|sub| sub.get_name() != "help").cloned());
        let mut page = Vec::new();
        let rendered = clap_mangen::Man::new(command).render(&mut page);
        rendered.map_err(|e| Failure::work(format_args!("cannot write the page of {name}: {e}")))?;
        files.push((args.folder.join(format!("{name}.1")), page));
    }
    std::fs::create_dir_all(&args.folder).map_err(|e| {
        Failure::input(format_args!("cannot make the folder {}: {}", args.folder.display(), io::reason(&e)))
    })?;
    io::write_files(&files)?;
    say(&format!("{} pages in {}", files.len(), args.folder.display()))
}
