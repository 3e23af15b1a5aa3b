// page_planner_test.js PLANNER.js ECHELON: the planner in the page answers as the binary does, to the last digit, and refuses
// in its words. Skipped (77) where there is no binary.
"use strict";
const { execFileSync, spawnSync } = require("child_process"), fs = require("fs"), os = require("os"), path = require("path");
const assert = require("assert");
const [planner, binary] = process.argv.slice(2);
if (!fs.existsSync(binary)) {
  console.log("there is no " + binary);
  process.exit(77);
}
const documentOf = html => {
  const mark = 'id="data">', begin = html.indexOf(mark) + mark.length;
  return JSON.parse(html.slice(begin, html.indexOf("</script>", begin)));
};
const comparable = document => {
  delete document.answer.search_seconds;
  delete document.answer.simulated;  // how many had to be looked at may differ, what was found may not
  delete document.command;  // names the page's file
  delete document.explanation;  // says how long the search took
  return JSON.stringify(document);
};
const said = [];
require(path.resolve(planner))({ noInitialRun: true, print: () => {}, printErr: text => said.push(text) }).then(module => {
  const directory = fs.mkdtempSync(path.join(os.tmpdir(), "page-planner-")), file = path.join(directory, "page.html");
  try {
    for (const words of ["plan --model llama-3-70b --machine h100 --gpus 64 --global-batch 512 --seq-len 8192",
                         "plan --model mixtral-8x7b --gpus 16 --global-batch 128 --objective memory",
                         "simulate --compare gpipe,1f1b,zb-h2,zb-v,dualpipe --pp 4 --microbatches 9 --times 1.25,1,0.5"]) {
      const how = to => words.startsWith("plan") ? ["--html", to] : ["--format", "html", "--out", to];
      execFileSync(binary, [...words.split(" "), ...how(file)]);
      assert.strictEqual(module.callMain([...words.split(" "), ...how("/page.html")]), 0, said.join("\n"));
      assert.strictEqual(comparable(documentOf(module.FS.readFile("/page.html", { encoding: "utf8" }))), comparable(documentOf(fs.readFileSync(file, "utf8"))), words);
    }
    for (const words of [["plan", "--gpus", "0"], ["plan", "--gpus", "6", "--tp", "5"], ["plan", "--memory-margin", "nan"], ["simulate", "--pp", "1e3"], ["plan", "--price", "1x", "--tokens", "1"]]) {
      said.length = 0;
      assert.strictEqual(module.callMain(words), 2);
      assert.strictEqual(said.join("\n"), spawnSync(binary, words, { encoding: "utf8" }).stderr.trim());
    }
    said.length = 0;
    assert.strictEqual(module.callMain(["plan", "--software", "echelon", "--model", "gpt2-tiny", "--gpus", "2", "--precision", "f32"]), 2);
    assert.match(said.join("\n"), /--software echelon: .*legal: another one/);
  } finally {
    fs.rmSync(directory, { recursive: true });
  }
  console.log("the page answers as the binary does");
  process.exitCode = 0;  // which the planner leaves at what it last returned
}).catch(error => {
  console.error(error.message || error);
  process.exit(1);
});
