use super::*;
use crate::llama::loader::{self, Config, Family, Llama3Scaling, Matrix, Rope, Weights};
use kvbm::DeviceBlocks;
use proptest::prelude::*;
use std::ops::Range;

/// A seeded stream of numbers in `-0.5 .. 0.5`.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32 - 0.5
    }

    fn below(&mut self, n: usize) -> usize {
        (((self.next() + 0.5) * n as f32) as usize).min(n - 1)
    }

    fn vector(&mut self, n: usize, scale: f32, offset: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * scale + offset).collect()
    }

    fn matrix(&mut self, rows: usize, cols: usize) -> Matrix {
        // Outputs about as large as inputs.
        Matrix { rows, cols, data: self.vector(rows * cols, (12.0 / cols as f32).sqrt(), 0.0) }
    }
}

fn config(family: Family, heads: usize, kv_heads: usize, head_dim: usize) -> Config {
    Config {
        family,
        hidden: 40,
        layers: 2,
        heads,
        kv_heads,
        head_dim,
        intermediate: 72,
        vocabulary: 83,
        context: 4096,
        norm_eps: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: None },
        tied: family == Family::Qwen3,
        sliding_window: None,
        eos: vec![],
        bos: None,
    }
}

fn weights(config: &Config, seed: u64) -> Weights {
    let mut noise = Noise(seed);
    let Config { hidden, heads, kv_heads, head_dim, intermediate, vocabulary, family, .. } = *config;
    let qkv = (heads + 2 * kv_heads) * head_dim;
    let gain = |noise: &mut Noise, n| noise.vector(n, 0.5, 1.0);
    Weights {
        embed: Matrix { rows: vocabulary, cols: hidden, data: noise.vector(vocabulary * hidden, 2.0, 0.0) },
        layers: (0..config.layers)
            .map(|_| loader::Layer {
                attention_norm: gain(&mut noise, hidden),
                qkv: noise.matrix(qkv, hidden),
                qkv_bias: (family == Family::Qwen2).then(|| noise.vector(qkv, 1.0, 0.0)),
                q_norm: (family == Family::Qwen3).then(|| gain(&mut noise, head_dim)),
                k_norm: (family == Family::Qwen3).then(|| gain(&mut noise, head_dim)),
                output: noise.matrix(hidden, heads * head_dim),
                ffn_norm: gain(&mut noise, hidden),
                gate_up: noise.matrix(2 * intermediate, hidden),
                down: noise.matrix(hidden, intermediate),
            })
            .collect(),
        norm: gain(&mut noise, hidden),
        head: (!config.tied).then(|| noise.matrix(vocabulary, hidden)),
        identity: [seed as u8; 32],
    }
}

/// The same model as a textbook has it: double precision, one token after another, no blocks, no batch.
struct Textbook {
    config: Config,
    weights: Weights,
}

impl Textbook {
    fn times(matrix: &Matrix, x: &[f64]) -> Vec<f64> {
        let row = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        matrix.data.chunks_exact(matrix.cols).map(row).collect()
    }

    fn norm(&self, x: &[f64], gain: &[f32]) -> Vec<f64> {
        let square: f64 = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (square + f64::from(self.config.norm_eps)).sqrt();
        x.iter().zip(gain).map(|(x, gain)| x * scale * f64::from(*gain)).collect()
    }

    fn rotated(&self, head: &[f64], position: usize) -> Vec<f64> {
        let half = head.len() / 2;
        let mut out = head.to_vec();
        for i in 0..half {
            let mut frequency = self.config.rope.theta.powf(-2.0 * i as f64 / head.len() as f64);
            if let Some(Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_context }) =
                self.config.rope.scaling
            {
                let wavelength = std::f64::consts::TAU / frequency;
                let context = original_context as f64;
                if wavelength > context / low_freq_factor {
                    frequency /= factor;
                } else if wavelength > context / high_freq_factor {
                    let smooth = (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    frequency = (1.0 - smooth) * frequency / factor + smooth * frequency;
                }
            }
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            out[i] = head[i] * cos - head[i + half] * sin;
            out[i + half] = head[i + half] * cos + head[i] * sin;
        }
        out
    }

    /// Logits after the last token.
    fn logits(&self, tokens: &[u32]) -> Vec<f64> {
        let Config { heads, kv_heads, head_dim: dim, hidden, intermediate, .. } = self.config;
        let widen = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let embed = |t: &u32| widen(&self.weights.embed.data[*t as usize * hidden..][..hidden]);
        let mut stream: Vec<Vec<f64>> = tokens.iter().map(embed).collect();
        for layer in &self.weights.layers {
            let (mut q, mut k, mut v) = (vec![], vec![], vec![]);
            for (position, x) in stream.iter().enumerate() {
                let mut row = Self::times(&layer.qkv, &self.norm(x, &layer.attention_norm));
                for (x, bias) in row.iter_mut().zip(layer.qkv_bias.iter().flatten()) {
                    *x += f64::from(*bias);
                }
                let normed = |head: &[f64], gain: &Option<Vec<f32>>| match gain {
                    Some(gain) => self.norm(head, gain),
                    None => head.to_vec(),
                };
                let parts: Vec<&[f64]> = row.chunks_exact(dim).collect();
                let rotate = |parts: &[&[f64]], gain: &Option<Vec<f32>>| {
                    parts.iter().map(|head| self.rotated(&normed(head, gain), position)).collect::<Vec<_>>()
                };
                q.push(rotate(&parts[..heads], &layer.q_norm));
                k.push(rotate(&parts[heads..heads + kv_heads], &layer.k_norm));
                v.push(parts[heads + kv_heads..].iter().map(|head| head.to_vec()).collect::<Vec<_>>());
            }
            for (position, x) in stream.iter_mut().enumerate() {
                let mut attended = vec![];
                for (head, query) in q[position].iter().enumerate() {
                    let kv_head = head / (heads / kv_heads);
                    let from = self.config.sliding_window.map_or(0, |window| (position + 1).saturating_sub(window));
                    let score = |key: &Vec<Vec<f64>>| -> f64 {
                        query.iter().zip(&key[kv_head]).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
                    };
                    let scores: Vec<f64> = k[from..=position].iter().map(score).collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    attended
                        .extend((0..dim).map(|d| {
                            weights.iter().zip(&v[from..]).map(|(w, v)| w * v[kv_head][d]).sum::<f64>() / sum
                        }));
                }
                x.iter_mut().zip(Self::times(&layer.output, &attended)).for_each(|(x, y)| *x += y);
                let gate_up = Self::times(&layer.gate_up, &self.norm(x, &layer.ffn_norm));
                let (gate, up) = gate_up.split_at(intermediate);
                let gated: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                x.iter_mut().zip(Self::times(&layer.down, &gated)).for_each(|(x, y)| *x += y);
            }
        }
        let last = self.norm(stream.last().unwrap(), &self.weights.norm);
        Self::times(self.weights.head.as_ref().unwrap_or(&self.weights.embed), &last)
    }
}

/// A model with an `kv_cache`, and slots given out in a scattered order.
struct Machine {
    model: Model,
    kv_cache: KvCache,
    free: Vec<BlockId>,
}

/// A sequence on a machine.
struct Sequence {
    tokens: Vec<u32>,
    table: Vec<BlockId>,
    done: usize,
}

impl Machine {
    fn new(config: &Config, seed: u64, threads: usize, block_size: usize, blocks: usize) -> Self {
        let model = Model::new(config.clone(), weights(config, seed), threads).unwrap();
        let kv_cache = model.kv_cache(block_size, blocks).unwrap();
        // Slots hold what others left behind: not even a NaN there may matter.
        let junk = f32::NAN.to_le_bytes().repeat(kv_cache.block_bytes() / 4);
        let slots = (0..blocks as u32).map(BlockId);
        for slot in slots.clone() {
            kv_cache.write(slot, &junk);
        }
        let mut free: Vec<BlockId> = slots.collect();
        free.sort_by_key(|slot| slot.0.wrapping_mul(2_654_435_761));
        Self { model, kv_cache, free }
    }

    fn sequence(&mut self, tokens: Vec<u32>) -> Sequence {
        let blocks = tokens.len().div_ceil(self.kv_cache.block_size());
        Sequence { tokens, table: self.free.split_off(self.free.len() - blocks), done: 0 }
    }

    /// One pass over the next tokens of some sequences; logits of each.
    fn step(&self, work: &mut [(&mut Sequence, usize)]) -> Vec<Vec<f32>> {
        let chunks: Vec<Chunk<'_>> = work
            .iter()
            .map(|(sequence, count)| Chunk {
                tokens: &sequence.tokens[sequence.done..sequence.done + count],
                start: sequence.done,
                table: &sequence.table,
                logits: true,
            })
            .collect();
        let logits = self
            .model
            .forward(&chunks, &self.kv_cache, |mut logits| (0..chunks.len()).map(|i| logits.row(i).to_vec()).collect());
        for (sequence, count) in work.iter_mut() {
            sequence.done += *count;
        }
        logits
    }

    /// A sequence alone, in chunks; its last logits.
    fn run(&self, sequence: &mut Sequence, chunk: usize) -> Vec<f32> {
        loop {
            let count = chunk.min(sequence.tokens.len() - sequence.done);
            let logits = self.step(&mut [(sequence, count)]).remove(0);
            if sequence.done == sequence.tokens.len() {
                return logits;
            }
        }
    }

    /// All bytes of the sequence's full blocks.
    fn bytes(&self, sequence: &Sequence) -> Vec<u8> {
        let full = sequence.done / self.kv_cache.block_size();
        let mut bytes = vec![0; full * self.kv_cache.block_bytes()];
        for (slot, into) in sequence.table.iter().zip(bytes.chunks_exact_mut(self.kv_cache.block_bytes())) {
            self.kv_cache.read(*slot, into);
        }
        bytes
    }
}

fn tokens(n: usize, config: &Config, seed: u64) -> Vec<u32> {
    let mut noise = Noise(seed);
    (0..n).map(|_| noise.below(config.vocabulary) as u32).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

fn families() -> Vec<Config> {
    let llama3 = Llama3Scaling { factor: 4.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64 };
    vec![
        config(Family::Llama, 6, 2, 16),
        Config { rope: Rope { theta: 500_000.0, scaling: Some(llama3) }, ..config(Family::Llama, 4, 4, 8) },
        Config { sliding_window: Some(70), ..config(Family::Mistral, 4, 1, 20) },
        config(Family::Qwen2, 4, 2, 10),
        config(Family::Qwen3, 20, 1, 12),
    ]
}

#[test]
fn every_family_agrees_with_the_textbook() {
    for config in families() {
        let mut machine = Machine::new(&config, 7, 2, 16, 40);
        let mut sequence = machine.sequence(tokens(150, &config, 11));
        let got = machine.run(&mut sequence, 64);
        let want = Textbook { weights: weights(&config, 7), config }.logits(&sequence.tokens);
        let worst = got.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        // Logits are of the order of 1; single precision over some hundred terms loses about five digits of seven.
        assert!(worst < 5e-5, "{:?}: off by {worst}", machine.model.config().family);
    }
}

#[test]
fn a_long_context_agrees_with_the_textbook() {
    // Over 512 positions, attention is split along the keys.
    let config = Config { layers: 1, ..config(Family::Llama, 2, 1, 8) };
    let mut machine = Machine::new(&config, 3, 2, 24, 60);
    let mut sequence = machine.sequence(tokens(1200, &config, 5));
    let got = machine.run(&mut sequence, 500);
    let want = Textbook { weights: weights(&config, 3), config }.logits(&sequence.tokens);
    let worst = got.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    assert!(worst < 5e-5, "off by {worst}");
}

/// Cuts `0 .. n` at random places.
fn cuts(n: usize, largest: usize, noise: &mut Noise) -> Vec<usize> {
    let mut left = n;
    let mut counts = vec![];
    while left > 0 {
        let count = (1 + noise.below(largest)).min(left);
        counts.push(count);
        left -= count;
    }
    counts
}

/// Runs several sequences side by side, each in its own random chunks; answers their last logits.
fn run_mixed(machine: &Machine, sequences: &mut [Sequence], largest: &[usize], seed: u64) -> Vec<Vec<f32>> {
    let mut noise = Noise(seed);
    let mut plans: Vec<Vec<usize>> =
        sequences.iter().zip(largest).map(|(s, largest)| cuts(s.tokens.len(), *largest, &mut noise)).collect();
    let mut last = vec![vec![]; sequences.len()];
    while plans.iter().any(|plan| !plan.is_empty()) {
        // Each unfinished sequence takes part in about two of three steps.
        let takes: Vec<bool> = plans.iter().map(|plan| !plan.is_empty() && noise.below(3) > 0).collect();
        let mut work: Vec<(&mut Sequence, usize)> = sequences
            .iter_mut()
            .zip(&mut plans)
            .zip(&takes)
            .filter(|(_, takes)| **takes)
            .map(|((sequence, plan), _)| (sequence, plan.pop().unwrap()))
            .collect();
        let logits = machine.step(&mut work);
        for (i, logits) in takes.iter().enumerate().filter(|(_, takes)| **takes).map(|(i, _)| i).zip(logits) {
            last[i] = logits;
        }
    }
    last
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Chunks, neighbours, threads and slots change no bit of a sequence's KV and logits.
    #[test]
    fn a_row_depends_only_on_its_own_tokens(
        family in 0usize..5,
        lengths in prop::collection::vec(1usize..700, 1..5),
        largest in prop::collection::vec(prop_oneof![Just(1usize), Just(7), Just(64), Just(300), Just(1024)], 5),
        threads in 1usize..5,
        block_size in prop_oneof![Just(16usize), Just(8), Just(24), Just(128)],
        seed in any::<u64>(),
    ) {
        let config = &families()[family];
        let blocks = lengths.iter().map(|n| n.div_ceil(block_size)).sum::<usize>() + 3;
        let mut alone = Machine::new(config, seed, 1, block_size, blocks);
        let mut mixed = Machine::new(config, seed, threads, block_size, blocks);
        let prompts: Vec<Vec<u32>> =
            lengths.iter().enumerate().map(|(i, n)| tokens(*n, config, seed ^ i as u64)).collect();
        // A sequence of single steps takes long; only short ones are decoded from the first token on.
        let largest: Vec<usize> =
            largest.iter().zip(&lengths).map(|(l, n)| if *n > 150 { (*l).max(40) } else { *l }).collect();
        mixed.free.reverse();
        let mut sequences: Vec<Sequence> = prompts.iter().map(|prompt| mixed.sequence(prompt.clone())).collect();
        let logits = run_mixed(&mixed, &mut sequences, &largest, seed);
        for (i, prompt) in prompts.iter().enumerate() {
            let mut sequence = alone.sequence(prompt.clone());
            let want = alone.run(&mut sequence, 512);
            prop_assert!(want.iter().all(|x| x.is_finite()));
            prop_assert_eq!(bits(&want), bits(&logits[i]), "logits of sequence {}", i);
            prop_assert!(alone.bytes(&sequence) == mixed.bytes(&sequences[i]), "blocks of sequence {}", i);
        }
    }
}

#[test]
fn decode_and_prefill_write_equal_kv_over_several_splits() {
    for config in
        [config(Family::Llama, 6, 2, 16), Config { sliding_window: Some(600), ..config(Family::Mistral, 4, 4, 8) }]
    {
        let (mut a, mut b) = (Machine::new(&config, 1, 2, 16, 90), Machine::new(&config, 1, 3, 16, 90));
        let (mut prefilled, mut decoded) = (a.sequence(tokens(1300, &config, 2)), b.sequence(tokens(1300, &config, 2)));
        let want = a.run(&mut prefilled, 1024);
        b.step(&mut [(&mut decoded, 1000)]);
        let got = b.run(&mut decoded, 1);
        assert_eq!(bits(&want), bits(&got));
        assert!(a.bytes(&prefilled) == b.bytes(&decoded));
    }
}

#[test]
fn blocks_moved_through_bytes_serve_as_the_original() {
    let config = config(Family::Qwen3, 4, 2, 16);
    let (mut there, mut here) = (Machine::new(&config, 9, 2, 16, 20), Machine::new(&config, 9, 2, 16, 20));
    assert_eq!(there.kv_cache.fingerprint(), here.kv_cache.fingerprint());
    assert_eq!(there.kv_cache.block_bytes(), 2 * 2 * 2 * 16 * 16 * 4);
    let prompt = tokens(100, &config, 1);
    let mut computed = there.sequence(prompt.clone());
    let want = there.run(&mut computed, 64);

    here.free.rotate_left(5);
    let mut moved = here.sequence(prompt);
    let mut blob = vec![0; there.kv_cache.block_bytes()];
    for (from, to) in computed.table[..6].iter().zip(&moved.table) {
        there.kv_cache.read(*from, &mut blob);
        here.kv_cache.write(*to, &blob);
    }
    moved.done = 96;
    assert_eq!(bits(&here.run(&mut moved, 512)), bits(&want));
}

#[test]
fn chunks_without_logits_still_write_their_blocks() {
    let config = config(Family::Llama, 4, 2, 8);
    let (mut a, mut b) = (Machine::new(&config, 2, 1, 16, 8), Machine::new(&config, 2, 1, 16, 8));
    let (mut quiet, mut loud) = (a.sequence(tokens(40, &config, 1)), b.sequence(tokens(40, &config, 1)));
    let chunk = |range: Range<usize>, sequence: &'_ Sequence, logits| (range, sequence.table.clone(), logits);
    let (range, table, logits) = chunk(0..33, &quiet, false);
    let chunk = Chunk { tokens: &quiet.tokens[range], start: 0, table: &table, logits };
    assert!(a.model.forward(&[chunk], &a.kv_cache, |logits| logits.data.is_empty()));
    quiet.done = 33;
    b.step(&mut [(&mut loud, 33)]);
    assert!(a.bytes(&quiet) == b.bytes(&loud));
    assert_eq!(bits(&a.run(&mut quiet, 7)), bits(&b.run(&mut loud, 7)));
}

#[test]
fn logits_reuse_one_buffer() {
    let config = config(Family::Llama, 4, 2, 8);
    let mut machine = Machine::new(&config, 2, 1, 16, 8);
    let buffers = |machine: &Machine| {
        let scratch = machine.model.scratch.lock();
        scratch.iter().map(|scratch| (scratch.logits.as_ptr(), scratch.logits.len())).collect::<Vec<_>>()
    };
    let mut sequence = machine.sequence(tokens(40, &config, 1));
    machine.step(&mut [(&mut sequence, 20)]);
    let first = buffers(&machine);
    assert_eq!(first[0].1, 2 * config.vocabulary, "room for two rows");
    machine.step(&mut [(&mut sequence, 20)]);
    assert_eq!(buffers(&machine), first);
}

#[test]
fn logits_are_processed_on_several_threads() {
    let config = config(Family::Llama, 4, 2, 8);
    let mut machine = Machine::new(&config, 2, 2, 16, 8);
    let (a, b) = (machine.sequence(tokens(16, &config, 1)), machine.sequence(tokens(16, &config, 2)));
    let chunks = [&a, &b].map(|of| Chunk { tokens: &of.tokens, start: 0, table: &of.table, logits: true });
    // Each of the two waits for the other; one after the other they never met.
    let met = (Mutex::new(0), parking_lot::Condvar::new());
    let both: Vec<bool> = machine.model.forward(&chunks, &machine.kv_cache, |mut logits| {
        let meet = |_| {
            *met.0.lock() += 1;
            met.1.notify_all();
            let most = std::time::Duration::from_mins(1);
            !met.1.wait_while_for(&mut met.0.lock(), |met| *met < 2, most).timed_out()
        };
        logits.rows().map(meet).collect()
    });
    assert_eq!(both, [true, true]);
}

#[test]
fn the_kv_cache_keeps_the_device_contract() {
    let kv_cache = KvCache::new(&config(Family::Llama, 4, 2, 8), 16, 9, &[1; 32]).unwrap();
    kvbm::device::conformance::check(&kv_cache);
}

#[test]
fn every_input_of_the_bytes_changes_the_fingerprint() {
    let base = config(Family::Llama, 4, 2, 8);
    let print = |config: &Config, block_size, identity| {
        KvCache::new(config, block_size, 1, &[identity; 32]).unwrap().fingerprint()
    };
    let others = [
        print(&base, 32, 0),
        print(&base, 16, 1),
        print(&Config { layers: 3, ..base.clone() }, 16, 0),
        print(&Config { kv_heads: 1, ..base.clone() }, 16, 0),
        print(&Config { norm_eps: 1e-6, ..base.clone() }, 16, 0),
        print(&Config { sliding_window: Some(64), ..base.clone() }, 16, 0),
        print(&Config { rope: Rope { theta: 5e5, scaling: None }, ..base.clone() }, 16, 0),
    ];
    assert_eq!(print(&base, 16, 0), print(&base, 16, 0));
    assert!(others.iter().all(|other| *other != print(&base, 16, 0)));
}
