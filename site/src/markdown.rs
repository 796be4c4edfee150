//! Markdown of the repository as HTML whose links stay inside the site.

use crate::layout::escape;
use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd, html};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// A converted page.
pub struct Page {
    /// The first heading.
    pub title: String,
    /// HTML.
    pub body: String,
    /// Files of the repository that the page links to.
    pub files: BTreeSet<PathBuf>,
}

/// Where a file's page is: `README.md` is `index.html` of its folder; source files get `.html` behind their name.
pub fn page_of(path: &Path) -> PathBuf {
    match path.file_name().and_then(|name| name.to_str()) {
        Some("README.md") => path.with_file_name("index.html"),
        Some(name) if name.ends_with(".md") => path.with_extension("html"),
        Some(name) if !served_as_it_is(path) => path.with_file_name(format!("{name}.html")),
        _ => path.to_path_buf(),
    }
}

/// Whether a browser shows the file itself.
pub fn served_as_it_is(path: &Path) -> bool {
    let end = path.extension().and_then(|end| end.to_str());
    end.is_some_and(|end| ["svg", "png", "html", "json", "txt", "csv"].contains(&end))
}

/// Converts the page at `path`; `texts` holds all pages of the site.
pub fn convert(root: &Path, path: &Path, text: &str, texts: &BTreeMap<PathBuf, String>) -> Page {
    let mut files = BTreeSet::new();
    let (mut title, mut heading) = (String::new(), None::<String>);
    // Headings get their names when their text is known: their events are kept back until then.
    let (mut events, mut held) = (Vec::new(), Vec::new());
    // Links that have no target on the site lose their tags.
    let mut dropped = 0;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH) {
        let event = match event {
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
                match target(root, path, &dest_url, texts, &mut files) {
                    Some(url) => Event::Start(Tag::Link { link_type, dest_url: url.into(), title, id }),
                    None => {
                        dropped += 1;
                        continue;
                    }
                }
            }
            Event::End(TagEnd::Link) if dropped > 0 => {
                dropped -= 1;
                continue;
            }
            Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
                let url = target(root, path, &dest_url, texts, &mut files).unwrap_or_default();
                Event::Start(Tag::Image { link_type, dest_url: url.into(), title, id })
            }
            other => other,
        };
        match &event {
            Event::Start(Tag::Heading { .. }) => {
                heading = Some(String::new());
                held.push(event);
                continue;
            }
            Event::End(TagEnd::Heading(_)) => {
                let words = heading.take().unwrap_or_default();
                if title.is_empty() {
                    title.clone_from(&words);
                }
                if let Some(Event::Start(Tag::Heading { id, .. })) = held.first_mut() {
                    *id = Some(CowStr::from(anchor(&words)));
                }
                events.append(&mut held);
                events.push(event);
                continue;
            }
            Event::Text(words) | Event::Code(words) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(words);
                }
            }
            Event::Start(Tag::Table(_)) => events.push(Event::Html("<div class=\"wide\">".into())),
            _ => {}
        }
        let ends_table = matches!(event, Event::End(TagEnd::Table));
        if heading.is_some() {
            held.push(event)
        } else {
            events.push(event)
        }
        if ends_table {
            events.push(Event::Html("</div>\n".into()));
        }
    }
    let mut body = String::new();
    html::push_html(&mut body, events.into_iter());
    Page { title: if title.is_empty() { escape(&path.display().to_string()) } else { title }, body, files }
}

/// The name that a heading can be linked by, as GitHub makes it.
fn anchor(words: &str) -> String {
    let name = words.trim().to_lowercase();
    let kept = name.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// A link from the page at `path` as the site has it; `None` for folders and files that are not text.
fn target(
    root: &Path,
    path: &Path,
    link: &str,
    texts: &BTreeMap<PathBuf, String>,
    files: &mut BTreeSet<PathBuf>,
) -> Option<String> {
    if link.contains("://") || link.starts_with('#') || link.starts_with("mailto:") {
        return Some(link.to_string());
    }
    let (file, anchor) = link.split_once('#').map_or((link, String::new()), |(file, name)| (file, format!("#{name}")));
    let linked = normal(&path.parent().unwrap_or(Path::new("")).join(file));
    let folder_page = linked.join("README.md");
    let linked = if texts.contains_key(&folder_page) { folder_page } else { linked };
    if !texts.contains_key(&linked) {
        if !root.join(&linked).is_file() {
            return None;
        }
        files.insert(linked.clone());
    }
    Some(relative(&page_of(path), &page_of(&linked)) + &anchor)
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

/// The way from one page to another.
pub fn relative(from: &Path, to: &Path) -> String {
    let depth = from.components().count().saturating_sub(1);
    "../".repeat(depth) + &to.to_string_lossy().replace('\\', "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_become_links_of_the_site() {
        let path = Path::new("docs/guide/a.md");
        let texts = BTreeMap::from([
            (PathBuf::from("docs/guide/b.md"), String::new()),
            (PathBuf::from("docs/lab/README.md"), String::new()),
        ]);
        let mut files = BTreeSet::new();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut to = |link: &str| target(root, path, link, &texts, &mut files);
        assert_eq!(to("b.md#x").unwrap(), "../../docs/guide/b.html#x");
        assert_eq!(to("../lab/README.md").unwrap(), "../../docs/lab/index.html");
        assert_eq!(to("https://example.org/").unwrap(), "https://example.org/");
        assert_eq!(to("../../examples/attention.rs").unwrap(), "../../examples/attention.rs.html");
        assert_eq!(to("../../examples"), None);
        assert_eq!(files, BTreeSet::from([PathBuf::from("examples/attention.rs")]));
    }

    #[test]
    fn headings_have_names_and_tables_scroll() {
        let page = convert(Path::new("."), Path::new("a.md"), "# A `b` C\n\n| x |\n| --- |\n| 1 |\n", &BTreeMap::new());
        assert_eq!(page.title, "A b C");
        assert!(
            page.body.contains("<h1 id=\"a-b-c\">") && page.body.contains("<div class=\"wide\"><table>"),
            "{}",
            page.body
        );
    }
}
