// page_planner_test.js PLANNER.js WORKER.js ECHELON: the planner in the page answers as the binary does, to the last digit, and
// refuses in its words. Skipped (77) where there is no binary.
"use strict";
const { execFileSync, spawnSync } = require("child_process"), fs = require("fs"), os = require("os"), path = require("path");
const assert = require("assert");
const [planner, worker, binary] = process.argv.slice(2);
if (!fs.existsSync(binary)) {
  console.log("there is no " + binary);
  process.exit(77);
}
const { plannerAnswers } = require(path.resolve(worker));
const documentOf = html => {
  const mark = 'id="data">', begin = html.indexOf(mark) + mark.length;
  return JSON.parse(html.slice(begin, html.indexOf("</script>", begin)));
};
// All but where the page went, and how long the search took.
const comparable = (document, file) => {
  document.command = document.command.replaceAll(file, "FILE");
  if (document.answer.search_seconds !== undefined) {
    document.answer.search_seconds = 0;
    const took = / simulated, in [\d.]+ m?s/;
    assert.match(document.explanation, took);
    document.explanation = document.explanation.replace(took, "");
  }
  return document;
};
const said = [];
require(path.resolve(planner))({ noInitialRun: true, print: () => {}, printErr: text => said.push(text) }).then(module => {
  const directory = fs.mkdtempSync(path.join(os.tmpdir(), "page-planner-")), file = path.join(directory, "page.html");
  const ask = words => {
    const answers = {};
    plannerAnswers(module, said, words, answer => Object.assign(answers, answer));
    return answers;
  };
  try {
    for (const line of ["plan --model llama-3-70b --machine h100 --gpus 64 --global-batch 512 --seq-len 8192",
                        "plan --model mixtral-8x7b --gpus 16 --global-batch 128 --objective memory",
                        "plan --model llama-3-70b --gpus 2 --global-batch 16",  // which nothing fits
                        "simulate --compare gpipe,1f1b,zb-h2,zb-v,dualpipe --pp 4 --microbatches 9 --times 1.25,1,0.5"]) {
      const words = line.split(" "), plans = words[0] === "plan";
      const status = spawnSync(binary, [...words, ...(plans ? ["--html", file] : ["--format", "html", "--out", file])]).status;
      const answers = ask(words);
      assert.strictEqual(answers.trouble, undefined, line);
      assert.strictEqual(status, line.includes("--gpus 2 ") ? 1 : 0, line);
      const page = JSON.parse(answers.document);
      if (plans) {
        assert.strictEqual(page.survey, null);  // which comes after it
        page.survey = JSON.parse(answers.survey);
      }
      const mine = comparable(page, "/page.html"), its = comparable(documentOf(fs.readFileSync(file, "utf8")), file);
      for (const name of new Set([...Object.keys(mine), ...Object.keys(its)]))
        assert.strictEqual(JSON.stringify(mine[name]), JSON.stringify(its[name]), `${name} of ${line}`);
    }
    for (const words of [["plan", "--gpus", "0"], ["plan", "--gpus", "6", "--tp", "5"], ["plan", "--memory-margin", "nan"], ["plan", "--model", "nope"],
                         ["simulate", "--pp", "1k"], ["simulate", "--times", "0,0,0"], ["plan", "--price", "1x", "--tokens", "1"]]) {
      const sentence = spawnSync(binary, words, { encoding: "utf8" }).stderr.trim();
      assert.strictEqual(ask(words).trouble, sentence);
      assert.strictEqual(module.callMain(words), 2);
    }
    assert.match(ask(["plan", "--software", "echelon", "--model", "gpt2-tiny", "--gpus", "2", "--precision", "f32"]).trouble, /--software echelon: .*legal: another one/);
  } finally {
    fs.rmSync(directory, { recursive: true });
  }
  console.log("the page answers as the binary does");
  process.exitCode = 0;  // which the planner leaves at what it last returned
}).catch(error => {
  console.error(error.message || error);
  process.exit(1);
});
