//! Every row, with every combination of its words, is given to the assembler; so is every combination that a row says
//! does not exist.

use super::ptxas;
use super::uses::{Use, uses};
use fulgurite_ptx::Arch;
use fulgurite_ptx::inst::{Archs, Inst, Needs};
use fulgurite_ptx::table;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// Targets that a row is assembled for: the oldest it names and Hopper, or each of those that alone have it.
fn targets(needs: Needs) -> Vec<String> {
    match needs.archs {
        Archs::From(sm) => vec![format!("sm_{sm}"), "sm_90a".into()],
        Archs::Only(all) => all.iter().map(|sm| format!("sm_{sm}a")).collect(),
    }
}

/// The oldest PTX version that knows a target.
fn floor(target: &str) -> (u8, u8) {
    if target == "sm_90" { (7, 8) } else { Arch::named(target).expect("a target of the table").ptx_floor }
}

/// A text with all these uses, and the use that each line belongs to.
fn text<'a>(version: (u8, u8), target: &str, uses: &[&'a Use]) -> (String, Vec<&'a Use>) {
    let mut text = format!(".version {}.{}\n.target {target}\n.address_size 64\n", version.0, version.1);
    text.push_str(".extern .shared .align 1024 .b8 smem[];\n");
    let mut owners: Vec<&Use> = vec![uses[0]; text.lines().count() + 1];
    for (i, one) in uses.iter().enumerate() {
        let entry = one.entry(&format!("k{i}"));
        owners.extend(std::iter::repeat_n(*one, entry.lines().count()));
        text.push_str(&entry);
    }
    (text, owners)
}

/// Uses by the version and target they are assembled for.
fn batches<'a>(all: &'a [(&'static Inst, Vec<Use>)]) -> BTreeMap<(String, (u8, u8)), Vec<&'a Use>> {
    let mut batches: BTreeMap<_, Vec<&Use>> = BTreeMap::new();
    for (inst, uses) in all {
        for target in targets(inst.needs) {
            let version = inst.needs.ptx.max(floor(&target));
            batches.entry((target, version)).or_default().extend(uses);
        }
    }
    batches
}

fn assembler() -> Option<std::path::PathBuf> {
    let found = ptxas::find();
    if found.is_none() {
        println!("skipped: no ptxas in $PTXAS, on the path, or in target/venv*: nothing was assembled");
    }
    found
}

fn refused(ptxas: &Path, target: &str, version: (u8, u8), uses: &[&Use]) -> Vec<(String, String)> {
    let (text, owners) = text(version, target, uses);
    let complaints = ptxas::complaints(ptxas, target, &text);
    complaints.into_iter().map(|(line, what)| (owners[line].line(), what)).collect()
}

#[test]
fn every_use_is_assembled() {
    let Some(ptxas) = assembler() else { return };
    let allowed = |inst| {
        let [allowed, _] = uses(inst);
        (inst, allowed)
    };
    let all: Vec<_> = table::rows().map(allowed).collect();
    let mut wrong = Vec::new();
    let mut count = 0;
    for ((target, version), uses) in batches(&all) {
        count += uses.len();
        for (line, what) in refused(&ptxas, &target, version, &uses) {
            wrong.push(format!("{target} {}.{}: {line}   {what}", version.0, version.1));
        }
    }
    let rows = table::rows().count();
    let distinct: usize = all.iter().map(|(_, uses)| uses.len()).sum();
    println!("{rows} rows, {distinct} uses, assembled {count} times");
    assert!(wrong.is_empty(), "{} refused:\n{}", wrong.len(), wrong.join("\n"));
}

/// A combination that a row forbids does not exist: the rules say no more than the assembler.
#[test]
fn what_rows_forbid_does_not_exist() {
    let Some(ptxas) = assembler() else { return };
    let mut accepted = Vec::new();
    let mut count = 0;
    for inst in table::rows() {
        let [_, forbidden] = uses(inst);
        let target = targets(inst.needs).pop().expect("there is a target");
        let forbidden: Vec<&Use> = forbidden.iter().collect();
        if forbidden.is_empty() {
            continue;
        }
        count += forbidden.len();
        let complaints = refused(&ptxas, &target, inst.needs.ptx.max(floor(&target)), &forbidden);
        let refused: HashSet<String> = complaints.into_iter().map(|(line, _)| line).collect();
        accepted.extend(forbidden.iter().map(|one| one.line()).filter(|line| !refused.contains(line)));
    }
    println!("{count} combinations are forbidden");
    assert!(accepted.is_empty(), "{} are forbidden and exist:\n{}", accepted.len(), accepted.join("\n"));
}
