//! The classes of traffic: lengths, sharing and intervals. Numbers come from published measurements where a source is
//! named. The others are chosen to make what the class stands for dominate.

use super::Generator;
use super::prompt::Prompt;

/// Share of requests with the hot prefix. The others share nothing.
const HOT_SHARE: f64 = 0.95;
/// Prompts that share nothing, beside hot ones: the mean of the coding requests in the Azure LLM inference trace of
/// 2023 (2,048 tokens).
const UNRELATED_TOKENS: f64 = 2048.0;
/// Limits of the tail of a prompt and of an output. Longer ones are rare, and one of them would be the p99 of a run.
const TAIL: std::ops::RangeInclusive<u64> = 16..=8192;
const OUTPUT: std::ops::RangeInclusive<u64> = 4..=2048;
/// Seconds that one output token takes in the intervals of a session: the client waits for the response before it
/// continues.
const OUTPUT_TOKEN_S: f64 = 0.015;

impl Generator {
    /// Agents. The prompt has 30k tokens at the first step and 60k after the last: 20 steps on average, each of which
    /// adds its output and the result of a tool. So there are a hundred prompt tokens for each output token, which is
    /// the mean that Manus published ("Context Engineering for AI Agents", 2025). One step in 25 starts six sub-agents
    /// at once, each with two requests that continue the same prompt.
    pub(super) fn agents(&mut self) {
        const PROGRAMS: usize = 6;
        const STEPS: std::ops::Range<u64> = 10..31;
        const SUB_AGENTS: u64 = 6;
        const SUB_AGENT_SHARE: f64 = 0.04;
        // Instructions and tools, the same for all sessions of a program.
        let programs: Vec<Prompt> = (0..PROGRAMS).map(|_| self.blocks.prompt(12 << 10)).collect();
        let per_session = 20.0 * (1.0 + SUB_AGENT_SHARE * 2.0 * SUB_AGENTS as f64);
        // Thirty steps of about fifteen seconds.
        self.sessions(per_session, 450.0, |it, begin_s| {
            let task = it.random.log_normal(18_000.0, 0.3, 4096..=30_000);
            let mut prompt = programs[it.random.zipf(PROGRAMS)].with(task, &mut it.blocks);
            let mut now_s = begin_s;
            for _ in 0..it.random.among(STEPS) {
                let output = it.random.log_normal(400.0, 0.8, OUTPUT);
                it.request(now_s, &prompt, output);
                if it.random.happens(SUB_AGENT_SHARE) {
                    for _ in 0..SUB_AGENTS {
                        it.sub_agent(now_s, &prompt);
                    }
                }
                let result = it.random.log_normal(1100.0, 1.0, TAIL);
                prompt.append(output + result, &mut it.blocks);
                // The tool runs.
                now_s += 2.0 + output as f64 * OUTPUT_TOKEN_S + it.random.exponential(4.0);
            }
        });
    }

    fn sub_agent(&mut self, begin_s: f64, parent: &Prompt) {
        let task = self.random.log_normal(500.0, 0.5, TAIL);
        let mut prompt = parent.with(task, &mut self.blocks);
        let output = self.random.log_normal(400.0, 0.8, OUTPUT);
        self.request(begin_s, &prompt, output);
        let result = self.random.log_normal(1100.0, 1.0, TAIL);
        prompt.append(output + result, &mut self.blocks);
        let next_s = begin_s + 2.0 + output as f64 * OUTPUT_TOKEN_S + self.random.exponential(4.0);
        let output = self.random.log_normal(400.0, 0.8, OUTPUT);
        self.request(next_s, &prompt, output);
    }

    /// No reuse. The means are those of both services in the Azure LLM inference trace of 2023: 2,048 prompt tokens of
    /// the coding service, 211 output tokens of the conversation service.
    pub(super) fn no_reuse(&mut self) {
        self.arrivals(1, |it, _, now_s| it.unrelated(now_s, 211.0));
    }

    fn unrelated(&mut self, now_s: f64, output: f64) {
        let tokens = self.random.log_normal(UNRELATED_TOKENS, 1.0, 64..=32_000);
        let prompt = self.blocks.prompt(tokens);
        let output = self.random.log_normal(output, 0.8, OUTPUT);
        self.request(now_s, &prompt, output);
    }

    /// One prefix, as a system prompt with tools or few-shot examples has it, and a tail of about a thousand tokens.
    pub(super) fn hot_prefix(&mut self, tokens: u64) {
        let prefix = self.blocks.prompt(tokens);
        self.arrivals(1, |it, _, now_s| it.hot_or_unrelated(now_s, &prefix));
    }

    fn hot_or_unrelated(&mut self, now_s: f64, prefix: &Prompt) {
        const OUTPUT_TOKENS: f64 = 270.0;
        if !self.random.happens(HOT_SHARE) {
            return self.unrelated(now_s, OUTPUT_TOKENS);
        }
        let tail = self.random.log_normal(1000.0, 0.6, TAIL);
        let output = self.random.log_normal(OUTPUT_TOKENS, 0.6, OUTPUT);
        let prompt = prefix.with(tail, &mut self.blocks);
        self.request(now_s, &prompt, output);
    }

    /// Thirty-two prefixes of 4k to 16k tokens whose popularity follows Zipf's law. After half of the requests another
    /// thirty-two take their place.
    pub(super) fn shifting_prefixes(&mut self) {
        const PREFIXES: usize = 32;
        let mut prefixes = || -> Vec<Prompt> {
            (0..PREFIXES)
                .map(|_| {
                    let tokens = self.random.among(4 << 10..16 << 10);
                    self.blocks.prompt(tokens)
                })
                .collect()
        };
        let sets = [prefixes(), prefixes()];
        self.arrivals(1, |it, nth, now_s| {
            if !it.random.happens(0.9) {
                return it.unrelated(now_s, 200.0);
            }
            let set = &sets[usize::from(nth >= it.requests / 2)];
            let tail = it.random.log_normal(500.0, 0.6, TAIL);
            let prompt = set[it.random.zipf(PREFIXES)].with(tail, &mut it.blocks);
            let output = it.random.log_normal(200.0, 0.8, OUTPUT);
            it.request(now_s, &prompt, output);
        });
    }

    /// 3k prompt tokens, of which all requests share 2k, and 620 output tokens.
    pub(super) fn decode_heavy(&mut self) {
        let prefix = self.blocks.prompt(2 << 10);
        self.arrivals(1, |it, _, now_s| {
            let tail = it.random.log_normal(1024.0, 0.4, TAIL);
            let prompt = prefix.with(tail, &mut it.blocks);
            let output = it.random.log_normal(620.0, 0.5, OUTPUT);
            it.request(now_s, &prompt, output);
        });
    }

    /// Questions about documents of 24k tokens, eight about each on average: the means of `LooGLE` (arXiv 2311.04939:
    /// 776 documents, 6,448 questions). Answers are short.
    pub(super) fn documents(&mut self) {
        const QUESTIONS: f64 = 8.3;
        const INTERVAL_S: f64 = 15.0;
        // Few sessions have more than four times the mean number of questions.
        self.sessions(QUESTIONS, 4.0 * QUESTIONS * INTERVAL_S, |it, begin_s| {
            let tokens = it.random.log_normal(24_000.0, 0.6, 4096..=96_000);
            let document = it.blocks.prompt(tokens);
            let mut now_s = begin_s;
            for _ in 0..it.random.geometric(QUESTIONS) {
                let question = it.random.log_normal(60.0, 0.5, TAIL);
                let prompt = document.with(question, &mut it.blocks);
                let output = it.random.log_normal(80.0, 0.8, OUTPUT);
                it.request(now_s, &prompt, output);
                now_s += it.random.exponential(INTERVAL_S);
            }
        });
    }

    /// Conversations. A turn has 296 tokens and its answer 441: the means of `WildChat` (arXiv 2405.01470). Those have
    /// 2.5 turns, here they have eight: short ones fit into few blocks and leave nothing to reuse. A conversation
    /// begins with one of eight system prompts.
    pub(super) fn chat(&mut self) {
        const ASSISTANTS: usize = 8;
        const TURNS: f64 = 8.0;
        let assistants: Vec<Prompt> = (0..ASSISTANTS).map(|_| self.blocks.prompt(1024)).collect();
        // Few conversations have more than four times the mean number of turns, of about forty seconds each.
        self.sessions(TURNS, 4.0 * TURNS * 40.0, |it, begin_s| {
            let mut prompt = assistants[it.random.zipf(ASSISTANTS)].clone();
            let mut now_s = begin_s;
            for _ in 0..it.random.geometric(TURNS) {
                let message = it.random.log_normal(296.0, 1.0, TAIL);
                prompt.append(message, &mut it.blocks);
                let output = it.random.log_normal(441.0, 0.8, OUTPUT);
                it.request(now_s, &prompt, output);
                prompt.append(output, &mut it.blocks);
                // The client reads and writes.
                now_s += 3.0 + output as f64 * OUTPUT_TOKEN_S + it.random.exponential(30.0);
            }
        });
    }

    /// Bursts of sixty requests within sixty milliseconds, all with one prefix of 16k tokens, as a batch of jobs sends
    /// them.
    pub(super) fn prefix_bursts(&mut self) {
        const BURST: usize = 60;
        let prefix = self.blocks.prompt(16 << 10);
        self.arrivals(BURST, |it, _, now_s| {
            for nth in 0..BURST {
                it.hot_or_unrelated(now_s + nth as f64 * 0.001, &prefix);
            }
        });
    }
}
