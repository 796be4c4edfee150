//! Parses modifiers from text: words in prefix order, as written by `fulgurite/trace.py`.

use fulgurite::Expr;
use fulgurite_core::expr::{batch, head, k, k_len, load, q, q_len, score, select};
use std::str::SplitAsciiWhitespace;

/// Largest nesting depth, which limits the parser's stack; no hand-written modifier is deeper.
const MAX_DEPTH: usize = 1000;

/// The expression of a text such as `sub score mul f0.5 float sub q k`.
pub fn parse(text: &str) -> Result<Expr, String> {
    let mut words = text.split_ascii_whitespace();
    let expression = next(&mut words, 0)?;
    match words.next() {
        None => Ok(expression),
        Some(word) => Err(format!("expression {text:?} goes on with {word:?} after its end")),
    }
}

fn next(words: &mut SplitAsciiWhitespace<'_>, depth: usize) -> Result<Expr, String> {
    if depth > MAX_DEPTH {
        return Err(format!("expression is nested more than {MAX_DEPTH} times; move constant parts into a tensor"));
    }
    let word = words.next().ok_or("expression ends too early")?;
    let number = |text: &str| text.parse::<f64>().map_err(|e| format!("{word:?} in an expression: {e}"));
    Ok(match word {
        "score" => score(),
        "b" => batch(),
        "h" => head(),
        "q" => q(),
        "k" => k(),
        "q_len" => q_len(),
        "k_len" => k_len(),
        "true" => true.into(),
        "false" => false.into(),
        "load" => {
            let name = words.next().ok_or("expression ends after `load`")?;
            let rank = words.next().and_then(|rank| rank.parse::<usize>().ok()).filter(|&rank| rank <= 6);
            let rank = rank.ok_or_else(|| format!("`load {name}` in an expression has no rank"))?;
            let at = (0..rank).map(|_| next(words, depth + 1)).collect::<Result<Vec<_>, _>>()?;
            load(name, at)
        }
        "select" => {
            let condition = next(words, depth + 1)?;
            let (yes, no) = (next(words, depth + 1)?, next(words, depth + 1)?);
            select(condition, yes, no)
        }
        "neg" | "abs" | "exp" | "log" | "sqrt" | "tanh" | "not" | "float" | "floor" => {
            let x = next(words, depth + 1)?;
            match word {
                "neg" => -x,
                "abs" => x.abs(),
                "exp" => x.exp(),
                "log" => x.log(),
                "sqrt" => x.sqrt(),
                "tanh" => x.tanh(),
                "not" => !x,
                "float" => x.to_float(),
                _ => x.floor(),
            }
        }
        "add" | "sub" | "mul" | "div" | "rem" | "min" | "max" | "eq" | "lt" | "le" | "and" | "or" => {
            let (x, y) = (next(words, depth + 1)?, next(words, depth + 1)?);
            match word {
                "add" => x + y,
                "sub" => x - y,
                "mul" => x * y,
                "div" => x / y,
                "rem" => x % y,
                "min" => x.min(y),
                "max" => x.max(y),
                "eq" => x.equals(y),
                "lt" => x.less(y),
                "le" => x.at_most(y),
                "and" => x & y,
                _ => x | y,
            }
        }
        _ => match word.split_at_checked(1) {
            Some(("f", text)) => (number(text)? as f32).into(),
            Some(("i", text)) => text.parse::<i32>().map_err(|e| format!("{word:?} in an expression: {e}"))?.into(),
            _ => return Err(format!("expression has the unknown word {word:?}")),
        },
    })
}
