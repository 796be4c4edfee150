//! Measures the speed of memory: several threads sum buffers. This is the upper limit for the speed of decoding.

use crate::memory::sum_words;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Streams that one thread reads in parallel, so that the prefetchers work on more than one page.
const STREAMS: usize = 4;
/// Words per cache line: a step of each stream.
const LINE_WORDS: usize = 8;

/// The wrapping sum of all words. It is inlined into one function per instruction set, which vectorises it.
#[inline(always)]
pub fn sum(words: &[u64]) -> u64 {
    let stream_words = words.len() / STREAMS / LINE_WORDS * LINE_WORDS;
    let (body, tail) = words.split_at(stream_words * STREAMS);
    let mut sums = [[0u64; LINE_WORDS]; STREAMS];
    if stream_words > 0 {
        let mut streams = body.chunks_exact(stream_words).map(|stream| stream.as_chunks::<LINE_WORDS>().0);
        let mut next = || streams.next().expect("the body is STREAMS streams long");
        let (a, b, c, d) = (next(), next(), next(), next());
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            for (sum, line) in sums.iter_mut().zip([a, b, c, d]) {
                for (sum, word) in sum.iter_mut().zip(line) {
                    *sum = sum.wrapping_add(*word);
                }
            }
        }
    }
    let all = sums.iter().flatten().chain(tail);
    all.fold(0, |sum, word| sum.wrapping_add(*word))
}

/// Sums all words with `threads` threads, each with its share of every buffer. Returns the sum, and the seconds from
/// the start of the first thread, when all are ready, to the end of the last.
pub fn read_sum(buffers: &[&[u64]], threads: usize) -> (u64, f64) {
    let share = |words: &[u64], number: usize| {
        let at = |n: usize| words.len() / threads * n + words.len() % threads * n / threads;
        at(number)..at(number + 1)
    };
    let work = |number: usize| {
        buffers.iter().fold(0u64, |sum, words| sum.wrapping_add(sum_words(&words[share(words, number)])))
    };
    let ready = AtomicUsize::new(0);
    // Spin instead of sleeping: waking a thread would take a tenth of the measured time.
    let meet = || {
        ready.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0u32;
        while ready.load(Ordering::Acquire) < threads {
            spins += 1;
            if spins.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    };
    let timed = |number: usize| {
        meet();
        let start = Instant::now();
        (work(number), start, Instant::now())
    };
    std::thread::scope(|scope| {
        let timed = &timed;
        let helpers: Vec<_> = (1..threads).map(|number| scope.spawn(move || timed(number))).collect();
        let own = timed(0);
        let (sum, start, end) = helpers.into_iter().fold(own, |(sum, start, end), helper| {
            let (share, begun, done) = helper.join().expect("reading cannot panic");
            (sum.wrapping_add(share), start.min(begun), end.max(done))
        });
        (sum, (end - start).as_secs_f64())
    })
}
