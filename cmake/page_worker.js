// The planner as a worker of its page, behind the planner's own code. A question is {words}, those of plan or simulate;
// its answers are {document}, and of a plan after it {survey}, both as JSON; or {trouble}, a sentence. Each question but
// the first waits for the one before it.
"use strict";
function plannerAnswers(module, said, words, answer) {
  const { FS } = module, page = "/page.html", survey = "/survey.json";
  const made = (file, all) => {
    said.length = 0;
    if (FS.analyzePath(file).exists) FS.unlink(file);
    const status = module.callMain(all);
    if (!FS.analyzePath(file).exists) throw new Error(said.filter(line => line).slice(-1)[0] || "the planner ended with status " + status);
    return FS.readFile(file, { encoding: "utf8" });
  };
  try {
    const html = made(page, [...words, ...(words[0] === "plan" ? ["--html", page] : ["--format", "html", "--out", page])]);
    const mark = 'id="data">', begin = html.indexOf(mark) + mark.length;
    answer({ document: html.slice(begin, html.indexOf("</script>", begin)) });
    if (words[0] === "plan") answer({ survey: made(survey, ["survey", survey, ...words]) });
  } catch (error) {
    answer({ trouble: error.message || String(error) });
  }
}
if (typeof module === "object" && module.exports) {
  module.exports = { plannerAnswers };
} else {
  const said = [], keep = text => said.push(text);
  const started = EchelonPlanner({ noInitialRun: true, print: keep, printErr: keep });
  onmessage = ({ data }) => started.then(planner => plannerAnswers(planner, said, data.words, answer => postMessage(answer)),
    error => postMessage({ trouble: "The planner did not start: " + error }));
}
