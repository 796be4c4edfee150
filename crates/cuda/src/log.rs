//! The compiler's messages about a kernel.

/// The log of the driver's compiler for a kernel, and the numbers in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Log {
    /// The complete log.
    pub text: String,
    /// Registers per thread, if the log says so.
    pub registers: Option<u32>,
    /// Bytes of spilled registers that a thread writes to memory.
    pub spill_store_bytes: u32,
    /// Bytes of spilled registers that a thread reads back.
    pub spill_load_bytes: u32,
    /// Lines that announce slow code: the compiler's C75xx messages.
    pub losses: Vec<String>,
}

impl Log {
    /// Parses the compiler's log.
    ///
    /// ```
    /// let log = fulgurite_cuda::Log::parse("ptxas info : 0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads");
    /// assert_eq!((log.spill_store_bytes, log.spill_load_bytes), (8, 4));
    /// ```
    pub fn parse(text: &str) -> Log {
        let mut log = Log { text: text.into(), ..Log::default() };
        for line in text.lines().map(str::trim) {
            let number = |after: &str| number_before(line, after);
            log.registers = number(" registers").or(log.registers);
            log.spill_store_bytes += number(" bytes spill stores").unwrap_or(0);
            log.spill_load_bytes += number(" bytes spill loads").unwrap_or(0);
            if is_loss(line) {
                log.losses.push(line.into());
            }
        }
        log
    }
}

/// The number that precedes the words.
fn number_before(line: &str, words: &str) -> Option<u32> {
    let before = &line[..line.find(words)?];
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Whether a line has a C75xx message: wgmma serialised, setmaxnreg ignored, and similar.
fn is_loss(line: &str) -> bool {
    let coded = line.match_indices("C75").any(|(at, _)| {
        let digits = line[at + 3..].bytes().take_while(u8::is_ascii_digit).count();
        digits == 2
    });
    coded || line.contains("Potential Performance Loss")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "info    : 0 bytes gmem\n\
        info    : Function properties for 'gemm':\n\
        info    : used 168 registers, 16 stack, 132 bytes smem, 24 bytes spill stores, 40 bytes spill loads\n\
        info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
        non wgmma instructions defining accumulator registers of a wgmma in the function 'gemm'\n";

    #[test]
    fn numbers_and_losses_are_found() {
        let log = Log::parse(REPORT);
        assert_eq!((log.registers, log.spill_store_bytes, log.spill_load_bytes), (Some(168), 24, 40));
        assert_eq!(log.losses.len(), 1);
        assert!(log.losses[0].contains("C7510"), "{log:?}");
        assert_eq!(log.text, REPORT);
    }

    #[test]
    fn other_lines_are_no_losses() {
        assert_eq!(Log::parse(""), Log::default());
        for line in ["info : C7599", "(C7508) setmaxnreg ignored"] {
            assert_eq!(Log::parse(line).losses, [line]);
        }
        for line in ["C750", "C75012", "ABC75", "info : Used 20 registers"] {
            assert!(Log::parse(line).losses.is_empty(), "{line}");
        }
    }
}
