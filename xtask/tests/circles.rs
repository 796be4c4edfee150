//! Files that import each other in a circle cannot be read one after the other. This test finds such circles.
//!
//! A file imports another when its code names an item that the other defines. Re-exports are followed to the definition, so a
//! module that only declares and re-exports its children imports nothing. Test modules are left out.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use syn::{Item, ItemMod, ItemUse, UseTree, Visibility};

/// A path of names from the root of a crate.
type Names = Vec<String>;

/// What a file defines and names.
#[derive(Default)]
struct Module {
    file: PathBuf,
    defines: HashSet<String>,
    /// Names that `use` brings into the module, with the path each stands for.
    aliases: HashMap<String, Names>,
    /// Modules whose every name is brought in.
    globs: Vec<Names>,
    /// Paths that the code names; those of re-exports are not among them.
    mentions: Vec<Names>,
}

/// Collects the paths that code names.
#[derive(Default)]
struct Mentions(Vec<Names>);

impl<'ast> Visit<'ast> for Mentions {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.0.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }
    fn visit_macro(&mut self, found: &'ast syn::Macro) {
        // Arguments of most macros are expressions with commas between them.
        let parse = syn::punctuated::Punctuated::<syn::Expr, syn::Token![,]>::parse_terminated;
        if let Ok(arguments) = syn::parse::Parser::parse2(parse, found.tokens.clone()) {
            arguments.iter().for_each(|argument| self.visit_expr(argument));
        }
        visit::visit_macro(self, found);
    }
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }
    fn visit_item_use(&mut self, _: &'ast ItemUse) {}
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|condition| condition.is_ident("test"))
    })
}

/// The leaves of a `use`: the name it brings in (`None` for a glob), and the path.
fn leaves(tree: &UseTree, before: &[String], found: &mut Vec<(Option<String>, Names)>) {
    let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => leaves(&path.tree, &with(&path.ident), found),
        UseTree::Name(name) if name.ident == "self" => found.push((before.last().cloned(), before.to_vec())),
        UseTree::Name(name) => found.push((Some(name.ident.to_string()), with(&name.ident))),
        UseTree::Rename(rename) if rename.ident == "self" => {
            found.push((Some(rename.rename.to_string()), before.to_vec()));
        }
        UseTree::Rename(rename) => found.push((Some(rename.rename.to_string()), with(&rename.ident))),
        UseTree::Glob(_) => found.push((None, before.to_vec())),
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, before, found)),
    }
}

fn name_of(item: &Item) -> Option<String> {
    Some(match item {
        Item::Const(item) => item.ident.to_string(),
        Item::Enum(item) => item.ident.to_string(),
        Item::Fn(item) => item.sig.ident.to_string(),
        Item::Static(item) => item.ident.to_string(),
        Item::Struct(item) => item.ident.to_string(),
        Item::Trait(item) => item.ident.to_string(),
        Item::Type(item) => item.ident.to_string(),
        Item::Union(item) => item.ident.to_string(),
        _ => return None,
    })
}

/// The modules of a crate by their paths.
struct Crate(BTreeMap<Names, Module>);

impl Crate {
    fn read(source: &Path) -> Crate {
        let mut modules = BTreeMap::new();
        let mut folders = vec![source.to_path_buf()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
                if entry.is_dir() {
                    folders.push(entry);
                } else if entry.extension().is_some_and(|extension| extension == "rs") {
                    let mut names: Names = entry
                        .strip_prefix(source)
                        .unwrap()
                        .with_extension("")
                        .iter()
                        .map(|name| name.to_string_lossy().into_owned())
                        .collect();
                    if ["mod", "lib"].contains(&names.last().unwrap().as_str()) {
                        names.pop();
                    }
                    if names != ["main"] && names.last().is_none_or(|name| name != "tests") {
                        let text = std::fs::read_to_string(&entry).unwrap();
                        modules.insert(names, Module::parse(&text, entry));
                    }
                }
            }
        }
        Crate(modules)
    }

    /// The module that defines what a path names, seen from a module.
    fn resolve(&self, from: &Names, path: &[String], depth: u32) -> Option<Names> {
        if depth == 0 {
            return None;
        }
        let (mut at, mut rest) = match path.first()?.as_str() {
            "crate" => (Names::new(), &path[1..]),
            "self" => (from.clone(), &path[1..]),
            "super" => {
                let ups = path.iter().take_while(|name| *name == "super").count();
                (from[..from.len().checked_sub(ups)?].to_vec(), &path[ups..])
            }
            _ => (from.clone(), path),
        };
        loop {
            let Some(name) = rest.first() else { return Some(at) };
            let module = self.0.get(&at)?;
            let child = [&at[..], std::slice::from_ref(name)].concat();
            // Names follow, so this one is a module, even where a function has the same name.
            if rest.len() > 1 && self.0.contains_key(&child) {
                (at, rest) = (child, &rest[1..]);
                continue;
            }
            if let Some(aliased) = module.aliases.get(name).filter(|path| path.last() != Some(name) || path.len() > 1) {
                let whole = [&aliased[..], &rest[1..]].concat();
                return self.resolve(&at, &whole, depth - 1);
            }
            if module.defines.contains(name) {
                return Some(at);
            }
            if self.0.contains_key(&child) {
                (at, rest) = (child, &rest[1..]);
                continue;
            }
            let found = module.globs.iter().find_map(|glob| {
                let whole = [&glob[..], rest].concat();
                self.resolve(&at, &whole, depth - 1)
            });
            return found;
        }
    }

    /// Which files import which.
    fn imports(&self) -> BTreeMap<&Names, BTreeSet<&Names>> {
        let key = |names: &Names| self.0.get_key_value(names).map(|(key, _)| key);
        let imports_of = |from: &Names, module: &Module| {
            let resolved = module.mentions.iter().filter_map(|path| self.resolve(from, path, 16));
            resolved.filter(|to| to != from).filter_map(|to| key(&to)).collect()
        };
        self.0.iter().map(|(from, module)| (from, imports_of(from, module))).collect()
    }

    /// Sets of files each of which reaches all others of the set.
    fn circles(&self) -> Vec<Vec<String>> {
        let imports = self.imports();
        let reached = |from| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
            while let Some(at) = open.pop() {
                open.extend(imports[at].iter().copied().filter(|to| seen.insert(*to)));
            }
            seen
        };
        let reached: BTreeMap<&Names, BTreeSet<&Names>> = self.0.keys().map(|from| (from, reached(from))).collect();
        let mut circles = BTreeSet::new();
        for (from, all) in reached.iter().filter(|(from, all)| all.contains(*from)) {
            let circle = all.iter().filter(|to| reached[*to].contains(from));
            circles.insert(circle.map(|names| self.0[*names].file.display().to_string()).collect::<Vec<_>>());
        }
        circles.into_iter().collect()
    }
}

impl Module {
    fn parse(text: &str, file: PathBuf) -> Module {
        let mut module = Module { file, ..Module::default() };
        let mut mentions = Mentions::default();
        let parsed = syn::parse_file(text).unwrap_or_else(|e| panic!("{}: {e}", module.file.display()));
        for item in &parsed.items {
            module.defines.extend(name_of(item));
            if let Item::Use(item) = item {
                if is_test(&item.attrs) {
                    continue;
                }
                let mut found = Vec::new();
                leaves(&item.tree, &[], &mut found);
                for (name, path) in found {
                    // A re-export imports nothing by itself; code that uses the name does.
                    if matches!(item.vis, Visibility::Inherited) {
                        mentions.0.push(path.clone());
                    }
                    match name {
                        Some(name) => drop(module.aliases.insert(name, path)),
                        None => module.globs.push(path),
                    }
                }
            } else {
                mentions.visit_item(item);
            }
        }
        module.mentions = mentions.0;
        module
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Crates whose files have an order.
const ORDERED: [&str; 4] = ["cli", "core", "fulgurite", "kernels"];

#[test]
fn no_files_import_each_other_in_a_circle() {
    let mut all = Vec::new();
    for name in ORDERED {
        let root = root();
        let circles = Crate::read(&root.join("crates").join(name).join("src")).circles();
        let shown = |circle: &Vec<String>| {
            circle
                .iter()
                .map(|file| file.trim_start_matches(&root.display().to_string()).to_owned())
                .collect::<Vec<_>>()
                .join(" ")
        };
        all.extend(circles.iter().map(shown));
    }
    assert!(all.is_empty(), "{} circles of files:\n{}", all.len(), all.join("\n"));
}

/// The check finds a circle through a re-export, and none where a facade only re-exports.
#[test]
fn a_planted_circle_is_found() {
    let files = |lib: &str, one: &str, two: &str| {
        let module = |text: &str, file: &str| Module::parse(text, file.into());
        let all = [(vec![], lib, "lib"), (vec!["one".into()], one, "one"), (vec!["two".into()], two, "two")];
        Crate(all.into_iter().map(|(names, text, file)| (names, module(text, file))).collect()).circles()
    };
    let facade = "pub mod one; pub mod two; pub use one::One;";
    assert!(files(facade, "pub struct One;", "use crate::One; pub fn two(_: One) {}").is_empty());
    let circle = files(facade, "use crate::two::two; pub struct One;", "use crate::One; pub fn two(_: One) {}");
    assert_eq!(circle, [["one", "two"]]);
    let hidden = files(
        facade,
        "pub struct One; fn f() { println!(\"{}\", crate::two::two(One)) }",
        "pub fn two(_: crate::One) {}",
    );
    assert_eq!(hidden, [["one", "two"]]);
    let tests = files(
        facade,
        "pub struct One; #[cfg(test)] mod tests { use crate::two::two; }",
        "pub fn two(_: crate::One) {}",
    );
    assert!(tests.is_empty());
}
