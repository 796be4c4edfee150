//! Grouped bars in small panels, as an SVG picture of its own.

use std::fmt::Write;

/// The meaning of one colour of bars.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Series {
    /// For the legend.
    pub name: String,
    /// A CSS colour.
    pub color: &'static str,
}

/// One set of axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// Above the axes.
    pub title: String,
    /// Along the horizontal axis: a label and one bar for each series; `None` leaves a gap.
    pub groups: Vec<(String, Vec<Option<f64>>)>,
}

/// A picture: rows of panels, each row with one vertical scale.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// On top.
    pub title: String,
    /// Under the title, smaller.
    pub subtitle: String,
    /// Under the horizontal axes.
    pub x_label: String,
    /// Beside the vertical axes.
    pub y_label: String,
    /// The colours.
    pub series: Vec<Series>,
    /// The panels, row by row.
    pub rows: Vec<Vec<Panel>>,
}

const WIDTH: f64 = 1000.0;
const HEAD: f64 = 112.0;
const LEFT: f64 = 66.0;
const GAP: f64 = 28.0;
const PLOT: f64 = 210.0;
const ROW: f64 = 300.0;
const INK: &str = "#1b1f24";
const GREY: &str = "#57606a";
const LINE: &str = "#d8dee4";

/// The picture as SVG text.
pub fn draw(chart: &Chart) -> String {
    let height = HEAD + ROW * chart.rows.len() as f64 + 6.0;
    let mut svg = String::new();
    let _ = write!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="{}" font-family="Helvetica, Arial, sans-serif" font-size="13">"#,
        escape(&chart.title)
    );
    let _ = write!(svg, r##"<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>"##);
    text(&mut svg, &Text { x: 20.0, y: 34.0, size: 20.0, weight: "bold", ..Text::new(&chart.title) });
    text(&mut svg, &Text { x: 20.0, y: 56.0, color: GREY, ..Text::new(&chart.subtitle) });
    legend(&mut svg, &chart.series);
    for (r, panels) in chart.rows.iter().enumerate() {
        let highest = largest(panels) * 1.08; // room for the number above the highest bar
        let step = tick_step(highest);
        let top = step * (highest / step).ceil().max(1.0);
        let width = (WIDTH - LEFT - 20.0 - GAP * panels.len().saturating_sub(1) as f64) / panels.len().max(1) as f64;
        let y = HEAD + ROW * r as f64 + 30.0;
        text(
            &mut svg,
            &Text {
                x: 18.0,
                y: y + PLOT / 2.0,
                anchor: "middle",
                turn: true,
                color: GREY,
                ..Text::new(&chart.y_label)
            },
        );
        for (p, panel) in panels.iter().enumerate() {
            let axes = Axes { x: LEFT + p as f64 * (width + GAP), y, width, top, step, labels: p == 0 };
            draw_panel(&mut svg, chart, panel, &axes);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

struct Axes {
    x: f64,
    y: f64,
    width: f64,
    top: f64,
    step: f64,
    labels: bool,
}

fn draw_panel(svg: &mut String, chart: &Chart, panel: &Panel, axes: &Axes) {
    let Axes { x, y, width, top, step, labels } = *axes;
    let bottom = y + PLOT;
    text(svg, &Text { x, y: y - 10.0, size: 14.0, weight: "bold", ..Text::new(&panel.title) });
    for tick in 0..=(top / step).round() as usize {
        let value = tick as f64 * step;
        let at = bottom - value / top * PLOT;
        let color = if tick == 0 { GREY } else { LINE };
        let _ = write!(svg, r#"<path d="M{x:.1} {at:.1}h{width:.1}" stroke="{color}" stroke-width="1"/>"#);
        if labels {
            let label = number(value);
            text(svg, &Text { x: x - 8.0, y: at + 4.5, anchor: "end", size: 12.0, color: GREY, ..Text::new(&label) });
        }
    }
    let group = width / panel.groups.len().max(1) as f64;
    let bars = chart.series.len().max(1) as f64;
    let bar = (group * 0.8 / bars).min(34.0);
    for (g, (label, values)) in panel.groups.iter().enumerate() {
        let middle = x + group * (g as f64 + 0.5);
        text(svg, &Text { x: middle, y: bottom + 18.0, anchor: "middle", size: 12.0, ..Text::new(label) });
        for (s, (series, value)) in chart.series.iter().zip(values).enumerate() {
            let Some(value) = value.filter(|v| v.is_finite() && *v >= 0.0) else { continue };
            let height = value / top * PLOT;
            let left = middle + (s as f64 - bars / 2.0) * bar;
            let _ = write!(
                svg,
                r#"<rect x="{:.1}" y="{:.1}" width="{:.1}" height="{height:.1}" fill="{}"><title>{}, {}: {}</title></rect>"#,
                left + 0.75,
                bottom - height,
                bar - 1.5,
                series.color,
                escape(&series.name),
                escape(label),
                number(value)
            );
            if bar >= 18.0 {
                let label = if value >= 10.0 { format!("{value:.0}") } else { number(value) };
                let (x, y) = (left + bar / 2.0, bottom - height - 4.0);
                text(svg, &Text { x, y, anchor: "middle", size: 10.0, color: GREY, ..Text::new(&label) });
            }
        }
    }
    let label = &chart.x_label;
    let (x, y) = (x + width / 2.0, bottom + 38.0);
    text(svg, &Text { x, y, anchor: "middle", color: GREY, ..Text::new(label) });
}

fn legend(svg: &mut String, series: &[Series]) {
    let mut x = 20.0;
    for Series { name, color } in series {
        let _ = write!(svg, r#"<rect x="{x:.1}" y="73" width="13" height="13" fill="{color}"/>"#);
        text(svg, &Text { x: x + 19.0, y: 84.0, ..Text::new(name) });
        x += 19.0 + 7.2 * name.chars().count() as f64 + 22.0;
    }
}

struct Text<'a> {
    text: &'a str,
    x: f64,
    y: f64,
    size: f64,
    color: &'a str,
    anchor: &'a str,
    weight: &'a str,
    turn: bool,
}

impl<'a> Text<'a> {
    fn new(text: &'a str) -> Text<'a> {
        Text { text, x: 0.0, y: 0.0, size: 13.0, color: INK, anchor: "start", weight: "normal", turn: false }
    }
}

fn text(svg: &mut String, t: &Text<'_>) {
    let turn = if t.turn { format!(r#" transform="rotate(-90 {:.1} {:.1})""#, t.x, t.y) } else { String::new() };
    let _ = write!(
        svg,
        r#"<text x="{:.1}" y="{:.1}" font-size="{}" font-weight="{}" text-anchor="{}" fill="{}"{turn}>{}</text>"#,
        t.x,
        t.y,
        t.size,
        t.weight,
        t.anchor,
        t.color,
        escape(t.text)
    );
}

fn largest(panels: &[Panel]) -> f64 {
    let values = panels.iter().flat_map(|p| &p.groups).flat_map(|(_, values)| values).flatten();
    values.copied().filter(|v| v.is_finite()).fold(0.0, f64::max)
}

/// 1, 2, 2.5 or 5 times a power of ten, for about five lines.
fn tick_step(top: f64) -> f64 {
    let rough = (top / 5.0).max(1e-6);
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * power).find(|step| *step >= rough * 0.999).unwrap_or(power)
}

/// Three digits.
fn number(x: f64) -> String {
    if x >= 100.0 || x == 0.0 {
        format!("{x:.0}")
    } else if x >= 10.0 {
        format!("{x:.1}").trim_end_matches(".0").to_string()
    } else {
        format!("{x:.2}").trim_end_matches('0').trim_end_matches('.').to_string()
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        for (top, step) in [(170.0, 50.0), (119.0, 25.0), (100.0, 20.0), (3.0, 1.0), (0.7, 0.2), (0.0, 1e-6)] {
            assert!((tick_step(top) / step - 1.0).abs() < 1e-9, "{top}: {}", tick_step(top));
        }
    }

    #[test]
    fn numbers_have_three_digits() {
        for (x, text) in [(0.0, "0"), (0.5, "0.5"), (1.0, "1"), (12.34, "12.3"), (20.0, "20"), (170.4, "170")] {
            assert_eq!(number(x), text);
        }
    }

    #[test]
    fn odd_values_do_not_break_the_picture() {
        let panel =
            Panel { title: "<a & b>".into(), groups: vec![("x".into(), vec![Some(f64::NAN), None, Some(1.0)])] };
        let series = |name: &str| Series { name: name.into(), color: "#000" };
        let chart = Chart {
            title: "t".into(),
            subtitle: String::new(),
            x_label: "x".into(),
            y_label: "y".into(),
            series: vec![series("a"), series("b"), series("c")],
            rows: vec![vec![panel], vec![]],
        };
        let svg = draw(&chart);
        assert!(svg.contains("&lt;a &amp; b&gt;") && !svg.contains("NaN"));
    }
}
