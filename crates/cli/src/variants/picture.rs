//! A picture of each head's tiles of scores: those that are kept, and the level at which the others were left out.

use std::fmt::Write;

/// The fate of a tile, in the order of the levels that decide it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// No row sees a key of it.
    Hidden,
    /// Its head's class does not look there.
    Class,
    /// Means of tiles gave it little weight.
    Proxy,
    /// All its scores are below lambda of the maximum.
    Kernel,
    /// Computed.
    Kept,
}

impl Fate {
    /// All of them.
    pub const ALL: [Fate; 5] = [Fate::Hidden, Fate::Class, Fate::Proxy, Fate::Kernel, Fate::Kept];

    fn color(self) -> &'static str {
        match self {
            Fate::Hidden => "#ffffff",
            Fate::Class => "#d8dee4",
            Fate::Proxy => "#f4b680",
            Fate::Kernel => "#8fbbe9",
            Fate::Kept => "#1f5fa8",
        }
    }

    /// For the legend.
    pub fn words(self) -> &'static str {
        match self {
            Fate::Hidden => "hidden by the mask",
            Fate::Class => "left out by class",
            Fate::Proxy => "left out by proxy",
            Fate::Kernel => "dropped in the kernel",
            Fate::Kept => "kept",
        }
    }
}

/// The tiles of a head, row by row.
#[derive(Debug, Clone)]
pub struct Map {
    /// Above the picture.
    pub title: String,
    /// Tiles in a row.
    pub columns: usize,
    /// The fate of each tile.
    pub fates: Vec<Fate>,
}

/// Heads that are drawn; more would be too small to see.
pub const HEADS: usize = 8;
const SIDE: f64 = 300.0;
const GAP: f64 = 24.0;
const HEAD: f64 = 84.0;
/// Cells of a picture along each side; where there are more tiles, a cell stands for several.
const CELLS: usize = 150;

/// The picture as SVG text.
pub fn draw(title: &str, maps: &[Map]) -> String {
    let maps = &maps[..maps.len().min(HEADS)];
    let across = maps.len().clamp(1, 4);
    let (width, height) = (
        (GAP + (SIDE + GAP) * across as f64).max(720.0),
        HEAD + (SIDE + GAP + 20.0) * maps.len().div_ceil(across) as f64,
    );
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="kept tiles" font-family="Helvetica, Arial, sans-serif" font-size="13"><rect width="{width}" height="{height}" fill="#ffffff"/>"##
    );
    let _ = write!(svg, r#"<text x="{GAP}" y="30" font-size="18" font-weight="bold">{}</text>"#, escape(title));
    let mut x = GAP;
    for fate in Fate::ALL {
        let (color, words) = (fate.color(), fate.words());
        let _ = write!(svg, r##"<rect x="{x}" y="45" width="13" height="13" fill="{color}" stroke="#b1bac4"/>"##);
        let _ = write!(svg, r#"<text x="{:.0}" y="56">{words}</text>"#, x + 19.0);
        x += 42.0 + 6.6 * words.len() as f64;
    }
    for (i, map) in maps.iter().enumerate() {
        let x = GAP + (SIDE + GAP) * (i % across) as f64;
        let y = HEAD + 16.0 + (SIDE + GAP + 20.0) * (i / across) as f64;
        panel(&mut svg, map, x, y);
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, map: &Map, x: f64, y: f64) {
    let _ = write!(svg, r#"<text x="{x}" y="{:.0}">{}</text>"#, y - 6.0, escape(&map.title));
    let rows = map.fates.len() / map.columns.max(1);
    let by = map.columns.max(rows).div_ceil(CELLS).max(1);
    let (down, across) = (rows.div_ceil(by), map.columns.div_ceil(by));
    let size = SIDE / down.max(across).max(1) as f64;
    for row in 0..down {
        // A cell shows the fate of most of its tiles; runs of one colour are one rectangle.
        let fates: Vec<Fate> = (0..across).map(|column| most(map, rows, row * by, column * by, by)).collect();
        let mut start = 0;
        for run in fates.chunk_by(|a, b| a == b) {
            if run[0] != Fate::Hidden {
                let (left, top) = (x + start as f64 * size, y + row as f64 * size);
                let (wide, color) = (run.len() as f64 * size, run[0].color());
                let _ = write!(
                    svg,
                    r#"<rect x="{left:.2}" y="{top:.2}" width="{wide:.2}" height="{size:.2}" fill="{color}"/>"#
                );
            }
            start += run.len();
        }
    }
    let (wide, high) = (across as f64 * size, down as f64 * size);
    let _ =
        write!(svg, r##"<rect x="{x}" y="{y}" width="{wide:.2}" height="{high:.2}" fill="none" stroke="#b1bac4"/>"##);
}

fn most(map: &Map, rows: usize, row: usize, column: usize, by: usize) -> Fate {
    let mut counts = [0usize; Fate::ALL.len()];
    for r in row..(row + by).min(rows) {
        for c in column..(column + by).min(map.columns) {
            counts[map.fates[r * map.columns + c] as usize] += 1;
        }
    }
    // The last of equals, so that kept tiles win.
    let best = (0..counts.len()).max_by_key(|&i| (counts[i], i)).unwrap_or(0);
    Fate::ALL[best]
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_rectangles_and_hidden_tiles_are_paper() {
        use Fate::*;
        let map = Map { title: "a < b".into(), columns: 3, fates: vec![Kept, Hidden, Hidden, Class, Kept, Kept] };
        let svg = draw("t", std::slice::from_ref(&map));
        // Legend, then one run in the first row and two in the second.
        assert_eq!(svg.matches(Kept.color()).count(), 1 + 2);
        assert_eq!(svg.matches(Class.color()).count(), 1 + 1);
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"));
        assert!(svg.contains(r#"width="200.00" height="100.00""#), "two kept tiles side by side: {svg}");
    }

    #[test]
    fn many_tiles_share_cells() {
        let n = 1000;
        let fates = (0..n * n).map(|i| if i % n <= i / n { Fate::Kept } else { Fate::Hidden }).collect();
        let svg = draw("t", &vec![Map { title: String::new(), columns: n, fates }; 20]);
        assert!(svg.matches("<rect").count() < HEADS * (CELLS + 2) + 10);
        assert!(draw("nothing", &[]).ends_with("</svg>\n"));
    }
}
