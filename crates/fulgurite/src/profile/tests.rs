use super::*;
use proptest::prelude::*;
use proptest::sample::Index;

fn measured<T: Pass>(config: T) -> Measured<T> {
    Measured {
        rows: vec![
            ConfigRow { head_dims: 65..=128, keys: 0..1024, config },
            ConfigRow { head_dims: 65..=128, keys: 4096..u64::MAX, config },
        ],
        tried: vec![Tried { head_dim: 128, len: 512, config, gain: 1.25 }],
    }
}

fn profile() -> Profile {
    Profile {
        gpu: "Some GPU".into(),
        forward: measured(ForwardConfig { cols: 112, ..ForwardConfig::hopper(128, 512) }),
        backward: measured(BackwardConfig { rows: 96, sums: Some(8), ..BackwardConfig::hopper(128) }),
    }
}

fn parse(text: &str) -> Result<Profile, ProfileError> {
    Profile::parse(text, Path::new("x.profile"))
}

/// The committed file is what this release writes, byte for byte, and what it reads.
#[test]
fn the_text_of_a_profile_is_fixed() {
    let golden = include_str!("golden.toml");
    assert_eq!(profile().text().unwrap(), golden);
    assert_eq!(parse(golden), Ok(profile()));
}

/// A file written before a derived number existed is still read.
#[test]
fn a_missing_derived_number_is_derived() {
    let text = include_str!("golden.toml").replace("head_splits = \"rule\"\n", "").replace("pairs = \"rule\"\n", "");
    assert_eq!(parse(&text), Ok(profile()));
}

#[test]
fn its_tables_override_the_built_in_ones() {
    let Tables { forward, backward, .. } = profile().tables();
    assert_eq!(forward.find(128, 512).cols, 112);
    assert_eq!(forward.find(128, 1024).cols, 128);
    assert_eq!(forward.find(128, u64::MAX).cols, 112);
    assert_eq!(forward.find(64, 512), ForwardConfig::hopper(64, 512));
    assert_eq!(backward.find(128, 512).rows, 96);
    assert_eq!(backward.find(128, 1024), BackwardConfig::hopper(128));
}

/// An error names the file, the line with its key and value, what is allowed, and what to do.
#[test]
fn a_damaged_entry_is_refused_with_its_line() {
    let text = include_str!("golden.toml");
    let lines = |needle: &str| 1 + text.lines().position(|line| line == needle).unwrap();
    let first = |needle: &str, with: &str| (text.replacen(needle, with, 1), lines(needle), with.to_string());
    let damage = [
        (first("cols = 112", "cols = 113"), "integer `113`, expected a multiple of 16 from 32 to 256"),
        (first("cols = 112", "cols = \"many\""), "string \"many\", expected a multiple of 16 from 32 to 256"),
        (first("cols = 112", "columns = 112"), "unknown field `columns`, expected one of `groups`, `cols`"),
        (first("rows = 96", "rows = 97"), "integer `97`, expected a multiple of 16 from 64 to 128"),
        (first("registers = [232, 40]", "registers = [232]"), "expected an array of length 2"),
        (first("end = \"joined\"", "end = \"abrupt\""), "unknown variant `abrupt`, expected `joined` or `parts`"),
        (first("sums = 8", "sums = 0"), "integer `0`, expected a number from 1 to 65536, or \"rule\""),
        (first("drain = false", "drain = 0"), "integer `0`, expected a boolean"),
        (first("head_dim_from = 65", "head_dim_from = -65"), "expected u32"),
        (first("gain = 1.25", "gain = nan"), "floating point `NaN`, expected a finite number, 0 or more"),
        (first("gain = 1.25", "gain = -0.5"), "floating point `-0.5`, expected a finite number, 0 or more"),
        (first("gpu = \"Some GPU\"", "gpu = \"\""), "string \"\", expected the name of a GPU"),
        (first("gpu = \"Some GPU\"", "gpus = 1"), "unknown field `gpus`, expected one of `format`, `gpu`"),
        (first("[[backward.tried]]", "[[backward.tied]]"), "unknown field `tied`, expected `use` or `tried`"),
        (first("format = 2", "format = \"two\""), "string \"two\", expected i64"),
        (first("format = 2", "format 2"), "expected"),
    ];
    for ((text, line, entry), what) in damage {
        let refused = parse(&text).unwrap_err().to_string();
        let place = format!("profile x.profile, line {line}: {entry:?}: ");
        assert!(refused.starts_with(&place) && refused.contains(what), "{refused}\n{place}{what}");
        assert!(refused.ends_with("; if the file is deleted, `fulgurite tune` writes it anew"), "{refused}");
    }
}

#[test]
fn a_missing_entry_or_an_empty_range_is_refused() {
    let text = include_str!("golden.toml");
    let damage = [
        (text.replacen("gpu = \"Some GPU\"\n", "", 1), "missing field `gpu`"),
        (text.replacen("cols = 112\n", "", 1), "missing field `cols`"),
        (text.replacen("gain = 1.25\n", "", 1), "missing field `gain`"),
        (
            text.replacen("head_dim_to = 128", "head_dim_to = 64", 1),
            "`head_dim_to` is 64, allowed: `head_dim_from` = 65",
        ),
        (
            text.replacen("keys_below = 1024", "keys_below = 0", 1),
            "`keys_below` is 0, allowed: more than `keys_from` = 0",
        ),
        (String::new(), "missing field `format`"),
    ];
    for (text, what) in damage {
        let refused = parse(&text).unwrap_err().to_string();
        assert!(refused.starts_with("profile x.profile, line ") && refused.contains(what), "{refused}");
    }
}

#[test]
fn other_formats_are_refused() {
    let old = "fulgurite profile 1\ngpu NVIDIA H200\nuse head_dims 0..64 keys 0..1024: groups=2 cols=128\n";
    let expected = "profile x.profile is in the format of an older fulgurite; delete it and run `fulgurite tune` again";
    assert_eq!(parse(old).unwrap_err().to_string(), expected);
    assert_eq!(parse("format = 1").unwrap_err().to_string(), expected);
    let new = include_str!("golden.toml").replacen("format = 2", "format = 3\nsince = 2030", 1);
    let refused = parse(&new).unwrap_err();
    assert_eq!(refused, ProfileError::Newer { file: "x.profile".into(), format: 3 });
    assert_eq!(
        refused.to_string(),
        "profile x.profile: `format` is 3, allowed: 2; a newer fulgurite wrote it: update this one, or delete the file \
         and run `fulgurite tune` again"
    );
}

#[test]
fn another_gpus_profile_says_nothing() {
    let folder = std::env::temp_dir().join(format!("fulgurite-profile-{}", std::process::id()));
    let path = folder.join("x.profile");
    profile().save(&path).unwrap();
    assert_eq!(Profile::load(&path, "Some GPU"), Ok(profile()));
    assert!(Profile::load(&path, "Another GPU").unwrap().forward.rows.is_empty());
    assert!(Profile::load(&folder.join("none"), "Some GPU").unwrap().forward.rows.is_empty());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "a file was left beside the profile");
    fs::write(&path, "nonsense").unwrap();
    let refused = Profile::load(&path, "Some GPU").unwrap_err().to_string();
    assert!(refused.contains("line 1") && refused.contains("x.profile"), "{refused}");
    fs::remove_dir_all(folder).unwrap();
}

/// A configuration some steps of the search away from a built-in one.
fn some_config<T: Pass>() -> impl Strategy<Value = T> {
    let walk = (prop::sample::select(vec![64, 128, 192, 256]), prop::collection::vec(any::<Index>(), 0..6));
    walk.prop_map(|(head_dim, steps)| {
        steps.iter().fold(ConfigTable::default().find(head_dim, 512), |config: T, step| {
            let near = config.neighbours(head_dim);
            if near.is_empty() { config } else { near[step.index(near.len())] }
        })
    })
}

fn some_measured<T: Pass + 'static>() -> impl Strategy<Value = Measured<T>> {
    let open = prop_oneof![Just(u64::MAX), 1..1u64 << 40];
    let row = (0..300u32, 0..300u32, 0..1u64 << 40, open, some_config()).prop_map(|(dim, more, keys, end, config)| {
        let end = if end == u64::MAX { end } else { keys + end };
        ConfigRow { head_dims: dim..=dim + more, keys: keys..end, config }
    });
    let tried = (0..300u32, 0..1u64 << 40, 0.0..9.0f64, some_config());
    let tried = tried.prop_map(|(head_dim, len, gain, config)| Tried { head_dim, len, config, gain });
    let both = (prop::collection::vec(row, 0..4), prop::collection::vec(tried, 0..4));
    both.prop_map(|(rows, tried)| Measured { rows, tried })
}

fn some_profile() -> impl Strategy<Value = Profile> {
    let all = ("\\PC{1,20}", some_measured(), some_measured());
    all.prop_map(|(gpu, forward, backward)| Profile { gpu, forward, backward })
}

proptest! {
    #[test]
    fn it_is_read_as_it_is_written(profile in some_profile()) {
        let text = profile.text().unwrap();
        prop_assert_eq!(parse(&text), Ok(profile), "{}", text);
    }

    /// Damage gives a profile or an error that names the file, never a panic.
    #[test]
    fn damage_never_panics(at in any::<Index>(), gone in 0..40usize, put in "\\PC{0,8}|[0-9\\[\\]{}=\".,\n-]{0,8}") {
        let text = include_str!("golden.toml");
        let at = at.index(text.len());
        let damaged = format!("{}{put}{}", &text[..at], &text[(at + gone).min(text.len())..]);
        if let Err(e) = parse(&damaged) {
            prop_assert!(e.to_string().contains("x.profile"), "{e}");
        }
    }
}
