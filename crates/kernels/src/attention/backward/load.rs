//! The load role of the main kernel: one thread that loads, and one-thread jobs on the other warps.
//!
//! With CTA pairs three threads load: one finds tiles, one loads q, k and v, one loads d_o. d_o waits for other stages than q,
//! and one thread does not have the registers for all of it.

use crate::attention::backward::d_q::ordered::Ordered;
use crate::attention::backward::d_q::service::{Actor, Job, in_sequence};
use crate::attention::backward::state::{CtaPair, Main};
use crate::attention::backward::tiles::{Of, Step, Work};
use fulgurite_ptx::{Group, Scope, Thread, Val};

/// A tile whose numbers are read from shared memory wherever they are used: registers are short.
type Again<'a, 'k> = &'a dyn Fn(&Scope<'k, Thread>) -> Work<'k>;

/// The work of a job's thread.
type Run<'a, 'k> = Box<dyn Fn(&Scope<'k, Thread>) + 'a>;

/// The load role.
pub(crate) struct Load<'a, 'k>(pub &'a Main<'k>);

impl<'a, 'k> Load<'a, 'k> {
    /// All jobs of the role, each on a thread of its warp.
    pub fn run(&self, w: &Scope<'k, Group>) {
        let Main { d_q, map, pair, .. } = self.0;
        let mut jobs: Vec<(Job, Run<'_, 'k>)> = vec![(Job::new("load", 0), Box::new(|t| self.load_tiles(t)))];
        if let Some(pair) = pair {
            jobs.push((Job::new("load", 1), Box::new(|t| self.load_outputs(t, pair))));
            jobs.push((Job::new("load", 2), Box::new(|t| self.post_tiles(t, pair))));
            if let Some(ordered) = &d_q.ordered {
                jobs.push((Job::new(ordered.name(), 3), Box::new(|t| self.take_turns(t, pair, ordered))));
            }
        }
        for service in d_q.all() {
            for job in service.jobs() {
                jobs.push((job, Box::new(move |t| service.on_warp(t, map, job.warp))));
            }
        }
        for (job, run) in in_sequence(jobs).unwrap_or_else(|e| panic!("bug in fulgurite: {e}")) {
            d_q.log.enter(Actor::Load(job.warp));
            w.one_thread_of_warp(job.warp, |t| run(t));
        }
        w.sync_cluster();
    }

    /// Loads all tiles; with CTA pairs, all but d_o.
    fn load_tiles(&self, t: &Scope<'k, Thread>) {
        let Main { d_q, stages, pair, .. } = self.0;
        match pair {
            None => self.find_tiles(t, |t, work| self.load_tile(t, work)),
            Some(pair) => self.each_found(t, pair, |t, again| self.load_tile(t, &again(t))),
        }
        stages.tickets.put(t, &[]);
        d_q.all().iter().for_each(|service| service.on_end(t));
    }

    /// With CTA pairs: loads d_o of all tiles.
    fn load_outputs(&self, t: &Scope<'k, Thread>, pair: &CtaPair<'k>) {
        self.each_found(t, pair, |t, again| {
            self.each_step(t, again, |t, work, step| self.put_outputs(t, work, &step));
        });
    }

    /// With CTA pairs: finds tiles for the threads that load them.
    fn post_tiles(&self, t: &Scope<'k, Thread>, pair: &CtaPair<'k>) {
        self.find_tiles(t, |t, work| {
            pair.found.post(t, [work.tile, self.0.map.pair(work), work.steps[0], work.steps[1]]);
        });
        pair.found.post_end(t);
    }

    /// With CTA pairs in a fixed order: takes the turns of all steps.
    fn take_turns(&self, t: &Scope<'k, Thread>, pair: &CtaPair<'k>, ordered: &Ordered<'k>) {
        let map = &self.0.map;
        t.repeat(|t, leave| {
            pair.found.wait(t, 1);
            let work = self.found(t, pair);
            leave.when(work.steps[1].eq(0));
            // At once: the next tile is found when the loads of this one are done, which is before its additions.
            pair.found.pass(t, 1);
            self.each_step(t, &|_| work, |t, work, step| {
                ordered.take(t, map, work, [map.number(work, &step), step.step]);
            });
        });
    }

    /// Takes the next number from the counter. With CTA pairs the first CTA does.
    fn draw(&self, t: &Scope<'k, Thread>) -> Val<'k, u32> {
        let Main { counters, pair, .. } = self.0;
        let Some(_) = pair else { return counters.fetch_add(t, 0, 1) };
        let ticket = t.var(0u32);
        t.when(t.cluster_rank().eq(0), |t| ticket.set(counters.fetch_add(t, 0, 1)));
        ticket.get()
    }

    /// The number that the first CTA of a pair took, in both CTAs.
    fn share(&self, t: &Scope<'k, Thread>, ticket: Val<'k, u32>) -> Val<'k, u32> {
        self.0.pair.as_ref().map_or(ticket, |pair| pair.ticket.share(t, ticket))
    }

    /// Finds one tile after the other.
    fn find_tiles(&self, t: &Scope<'k, Thread>, found: impl FnOnce(&Scope<'k, Thread>, &Work<'k>)) {
        let Main { d_q, map, pair, .. } = self.0;
        // If a tile may wait for tiles before it, even the first tile of a CTA is taken from the counter: no number may
        // belong to a CTA that has not started.
        let waits = d_q.wait_for_tiles();
        let tile = t.var(if waits { self.share(t, self.draw(t)) } else { t.cluster() });
        let before = d_q.split.as_ref().map(|split| (split, t.var(false)));
        let tiles = map.tiles(t);
        t.repeat(|t, leave| {
            let more = match &d_q.split {
                Some(split) => split.has(tile.get()),
                None => tiles.seek(t, tile.get()),
            };
            leave.when(!more);
            let find = |number| tiles.find(t, number);
            let work = match &before {
                Some((split, before)) => split.find(tile.get(), before.get(), find),
                None => find(tile.get()),
            };
            d_q.all().iter().for_each(|service| service.on_tile(t, map, tile, &work));
            // Early: the number is used after this tile's loads.
            let ticket = (!waits).then(|| self.draw(t));
            found(t, &work);
            let next = |t: &Scope<'k, Thread>| {
                tile.set(match ticket {
                    Some(ticket) => self.share(t, ticket) + t.clusters(),
                    // Late: a number that a CTA has not started would keep others waiting.
                    None => {
                        pair.iter().for_each(|pair| pair.found.wait_free(t));
                        self.share(t, self.draw(t))
                    }
                });
            };
            match &before {
                Some((split, before)) => {
                    before.set(!before.get() & split.has_before(tile.get()));
                    t.when(!before.get(), next);
                }
                None => next(t),
            }
        });
    }

    /// The tile that another thread has found.
    fn found(&self, t: &Scope<'k, Thread>, pair: &CtaPair<'k>) -> Work<'k> {
        let [tile, pair, first, end] = pair.found.read(t, 1);
        let [batch, head] = self.0.map.heads.div_rem(pair);
        let sequence = self.0.map.sequence(t, batch);
        Work { tile, head, batch, steps: [first, end], piece: None, sequence }
    }

    /// Every tile that another thread finds.
    fn each_found(
        &self,
        t: &Scope<'k, Thread>,
        pair: &CtaPair<'k>,
        load: impl FnOnce(&Scope<'k, Thread>, Again<'_, 'k>),
    ) {
        let again = |t: &Scope<'k, Thread>| self.found(t, pair);
        t.repeat(|t, leave| {
            pair.found.wait(t, 1);
            leave.when(again(t).steps[1].eq(0));
            load(t, &again);
            pair.found.pass(t, 1);
        });
    }

    /// Loads a tile and its steps.
    fn load_tile(&self, t: &Scope<'k, Thread>, work: &Work<'k>) {
        let Main { config, inputs, map, stages, d_q, pair, .. } = self.0;
        let (rows, zero) = (config.rows, t.constant(0u32));
        self.each_step(t, &|_| *work, |t, work, step| {
            // Stages that are in step with others are filled before them.
            if pair.is_none() {
                self.put_outputs(t, work, &step);
            }
            stages.queries.put(t, |t, stage| {
                let (to, at) = (stage.tile(0), map.at(Of::Q, work, [zero, self.first_row(t, &step), step.head]));
                stage.load_for_all(t, to.rows(t.cluster_rank(), config.cta_rows()), &inputs.q, &at);
                stage.load_numbers(t, inputs.shift.at(map.number(work, &step) * rows));
            });
            // After the first queries, which need not wait until the tile before has left.
            t.when(step.first, |t| {
                stages.tickets.put(t, &work.message());
                let first_key = self.0.first_key(t, work);
                let at = |of| map.at(of, work, [zero, first_key, map.kv_head(work.head)]);
                stages.values.put(t, |t, stage| stage.load(t, stage.tile(0), &inputs.v, &at(Of::V)));
                if let Some(pair) = pair {
                    let (keys, half) = (config.cta_keys(), self.0.dims[0] / 2);
                    let first_other = (t.cluster_rank() ^ 1).mul_add(keys, work.tile * config.keys());
                    let at = map.at(Of::K, work, [t.cluster_rank() * half, first_other, work.head]);
                    pair.other_keys.put(t, |t, stage| stage.load(t, stage.tile(0), &pair.other_k, &at));
                }
                stages.keys.put(t, |t, stage| stage.load(t, stage.tile(0), &inputs.k, &at(Of::K)));
            });
            d_q.all().iter().for_each(|service| service.on_step(t, map, work, &step));
        });
    }

    /// Loads d_o of a step, in parts.
    fn put_outputs(&self, t: &Scope<'k, Thread>, work: &Work<'k>, step: &Step<'k>) {
        let Main { config, inputs, map, stages, .. } = self.0;
        let (dv, parts) = (self.0.dims[1], config.share.d_o_parts());
        for part in 0..parts {
            stages.outputs.put(t, |t, stage| {
                let col = t.constant(part * (dv / parts));
                let (to, at) = (stage.tile(0), map.at(Of::DO, work, [col, self.first_row(t, step), step.head]));
                stage.load_for_all(t, to.rows(t.cluster_rank(), config.cta_rows()), &inputs.d_o, &at);
                stage.load_numbers(t, inputs.delta.at(map.number(work, step) * config.rows));
            });
        }
    }

    /// The first row of a step that this CTA loads.
    fn first_row(&self, t: &Scope<'k, Thread>, step: &Step<'k>) -> Val<'k, u32> {
        let config = &self.0.config;
        t.cluster_rank().mul_add(config.cta_rows(), step.step * config.rows)
    }

    /// Every step of a tile, of one query head after the other.
    fn each_step(
        &self,
        t: &Scope<'k, Thread>,
        again: Again<'_, 'k>,
        load: impl FnOnce(&Scope<'k, Thread>, &Work<'k>, Step<'k>),
    ) {
        let (work, map) = (again(t), &self.0.map);
        let (step, head) = (t.var(work.steps[0]), t.var(map.first_head(work.head)));
        let started = t.var(false);
        t.repeat(|t, leave| {
            load(t, &again(t), Step { head: head.get(), step: step.get(), first: !started.get() });
            started.set(true);
            step.set(step.get() + 1);
            let work = again(t);
            t.when(step.get().eq(work.steps[1]), |_| {
                step.set(work.steps[0]);
                head.set(head.get() + 1);
            });
            // Computed again, not kept: registers are short.
            leave.when(head.get().eq(map.first_head(work.head + 1)));
        });
    }
}
