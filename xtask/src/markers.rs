//! Generated parts of Markdown files: what lies between `<!-- begin NAME -->` and `<!-- end NAME -->`.

/// The text with the part called `name` replaced; `None` when the markers are not there.
pub fn replace(text: &str, name: &str, part: &str) -> Option<String> {
    let (begin, end) = (format!("<!-- begin {name} -->"), format!("<!-- end {name} -->"));
    let start = text.find(&begin)? + begin.len();
    let stop = start + text[start..].find(&end)?;
    Some(format!("{}\n\n{}\n\n{}", &text[..start], part.trim(), &text[stop..]))
}

#[cfg(test)]
mod tests {
    use super::replace;

    #[test]
    fn only_the_named_part_changes() {
        let text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\nkept\n<!-- end y -->\n";
        let want = "a\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nb\n<!-- begin y -->\nkept\n<!-- end y -->\n";
        assert_eq!(replace(text, "x", "new\n").unwrap(), want);
        assert_eq!(replace(want, "x", "new").unwrap(), want);
        assert_eq!(replace(text, "z", "new"), None);
    }
}
