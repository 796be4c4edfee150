//! The table as a page, and the list of rows itself.

use fulgurite_ptx::inst::{Archs, Effect, Inst, Needs};
use fulgurite_ptx::table;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

fn needs(needs: Needs) -> String {
    let archs = match needs.archs {
        Archs::From(sm) => format!("sm_{sm}"),
        Archs::Only(all) => all.iter().map(|sm| format!("sm_{sm}a")).collect::<Vec<_>>().join(" "),
    };
    format!("{}.{}, {archs}", needs.ptx.0, needs.ptx.1)
}

fn effect(effect: Effect) -> String {
    match effect {
        Effect::Read(space) => format!("reads {space:?}").to_lowercase(),
        Effect::Write(space) => format!("writes {space:?}").to_lowercase(),
        Effect::Update(space) => format!("updates {space:?}").to_lowercase(),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn row(inst: &Inst) -> String {
    let text = inst.text.replace('|', "\\|");
    let source = inst.source.strip_prefix("PTX ISA, ").unwrap_or(inst.source);
    let unit = format!("{:?}", inst.unit).to_lowercase();
    format!("| {} | `{text}` | {} | {unit} | {} | {source} |\n", inst.name, needs(inst.needs), effect(inst.effect))
}

fn page() -> String {
    let mut page = String::from(
        "# Instructions\n\n\
         Every instruction that kernels can be built from. This page is written by a test from the table in \
         `crates/ptx/src/table`; `UPDATE=1 cargo test -p fulgurite-ptx --test all table::` writes it again.\n\n\
         In a text, names in braces are operands: registers, addresses, constants, or one of a few words. *Needs* is the \
         PTX version and the target from which on the assembler takes every form of the row; targets with `a` are the \
         only ones that have it. *Source* is a chapter of the PTX ISA manual.\n\n",
    );
    page.push_str(&format!("{} rows.\n\n", table::rows().count()));
    page.push_str("| name | text | needs | unit | effect | source |\n| --- | --- | --- | --- | --- | --- |\n");
    page.extend(table::rows().map(row));
    page
}

#[test]
fn the_page_is_what_the_table_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/instructions.md");
    let page = page();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &page).expect("the guide can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page,
        "docs/guide/instructions.md is stale; write it again with UPDATE=1 cargo test -p fulgurite-ptx --test all table::"
    );
}

#[test]
fn names_are_unique_and_operands_are_named_in_the_text() {
    let mut names = HashSet::new();
    for inst in table::rows() {
        assert!(names.insert(inst.name), "two rows are called {}", inst.name);
        for operand in inst.operands {
            assert!(
                inst.text.contains(&format!("{{{}}}", operand.name)),
                "{} does not print {}",
                inst.name,
                operand.name
            );
        }
        assert!(inst.source.starts_with("PTX ISA, "), "{} has no source", inst.name);
    }
}

/// Files of the table.
fn sources() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/table");
    std::fs::read_dir(folder).expect("the table is there").map(|entry| entry.expect("a file").path()).collect()
}

/// A row that is declared stands in the list of its file.
#[test]
fn no_row_is_forgotten() {
    let mut declared = 0;
    for path in sources() {
        let text = std::fs::read_to_string(&path).expect("the table can be read");
        for rest in text.split("pub static ").skip(1) {
            let Some((name, _)) = rest.split_once(": Inst =") else { continue };
            // Rows that a macro declares are listed by the macro.
            if name.starts_with('$') || name.contains([' ', '\n']) {
                continue;
            }
            declared += 1;
            let listed = [",", "]", "\n"].iter().any(|end| text.contains(&format!("&{name}{end}")));
            assert!(listed, "{name} of {} is not listed", path.display());
        }
    }
    assert!(declared > 100, "only {declared} rows were found in the sources");
}
