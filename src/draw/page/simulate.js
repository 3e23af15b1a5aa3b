// What simulate --format html shows besides timelines and memory.
function startSimulate() {
  const reports = data.answer.schedules || [data.answer], fit = reports.filter(r => r.valid);
  const box = section("numbers", "In numbers", "");
  box.classList.add("full");
  const least = Math.min(...fit.map(r => r.makespan));
  const over = list => { const a = Math.min(...list), b = Math.max(...list); return a === b ? show(a) : `${show(a)} to ${show(b)}`; };
  if (fit.length)
    box.append(table("Times in units of --times, activations in those of a full stage", ["schedule", "makespan", "bubble", "of the makespan", "peak activations of a rank", "weight versions", "copies", "messages"],
      fit.map(r => [r.schedule, show(r.makespan), show(r.bubble_time), amount("%", r.bubble_fraction, 3), over(r.peak_activations), over(r.weight_versions), String(r.parameter_copies), String(r.messages)]),
      { chosen: fit.length > 1 ? fit.findIndex(r => r.makespan === least) : -1 }));
  if (fit.length > 1) box.append(el("p", { class: "soft" }, "Marked: the shortest makespan."));
  if (fit.length < reports.length)
    box.append(table("Left out", ["schedule", "why"], reports.filter(r => !r.valid).map(r => [r.schedule, r.reason]), { long: [1] }));
  schedulesSection();
  memorySection();
  if (fit.length > 1) {
    const front = section("front", "Makespan against memory", "Lower is faster, further left needs less memory. A schedule is on the Pareto front if no other one is as good in both and better in one.");
    front.classList.add("full");
    const peak = r => Math.max(...r.peak_activations), on = r => !fit.some(o => o !== r && o.makespan <= r.makespan && peak(o) <= peak(r) && (o.makespan < r.makespan || peak(o) < peak(r)));
    const points = list => list.map(r => [peak(r), r.makespan, r.schedule, [["makespan", show(r.makespan)], ["peak activations", show(peak(r))], ["bubble", amount("%", r.bubble_fraction, 3)]]]);
    chart(front, { label: "Makespan over peak activations of the schedules", x: { name: "peak activations of a rank, of a full stage" }, y: { name: "makespan, in units of --times" }, high: 320, named: true,
      series: [{ name: "on the front", kind: "dots", colour: () => css("--accent"), points: points(fit.filter(on)) },
        { name: "not on it", kind: "dots", colour: () => css("--communication"), points: points(fit.filter(r => !on(r))) }] });
  }
}
