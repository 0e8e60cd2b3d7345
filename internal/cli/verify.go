package cli

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"os"

	"ninfer/internal/artifact"
	"ninfer/internal/convert"
)

type verifyCommand struct {
	Artifact      string `arg:"" help:"Entry file, or a version 2 file."`
	FileDigests   bool   `help:"Also compare the SHA-256 of every file with SHA256SUMS beside the artifact and with known releases."`
	Sums          string `name:"sha256sums" placeholder:"FILE" help:"Checksum list to compare with."`
	Against       string `placeholder:"FILE" help:"Another artifact that must hold the same."`
	Report        string `placeholder:"FILE" help:"Conversion or upgrade report; default: the one beside the artifact."`
	Manifest      string `placeholder:"FILE" help:"Manifest of ours to compare with; default: ARTIFACT.manifest.json."`
	WriteSums     bool   `help:"If all is well, enter the files into SHA256SUMS beside the artifact."`
	WriteManifest bool   `help:"If all is well, write ARTIFACT.manifest.json: ids, sizes and digests of files and objects."`
}

// verification is verify's JSON form for an artifact.
type verification struct {
	artifact.Result
	Manifest string                `json:"manifest,omitzero"` // path of the manifest used
	Profile  *convert.ProfileCheck `json:"profile,omitzero"`
}

func (c *verifyCommand) Run(e *environment) error {
	o := artifact.Options{Report: c.Report, FileDigests: c.FileDigests || c.WriteSums || c.WriteManifest, SHA256SUMS: c.Sums, Against: c.Against}
	if artifact.IsV2(c.Artifact) {
		return c.verifyV2(e, o)
	}
	manifest, err := c.readManifest(e, &o)
	if err != nil {
		return err
	}
	v := verification{}
	if v.Result, err = artifact.Verify(c.Artifact, o); err != nil {
		return err
	}
	if manifest != nil {
		v.Manifest = c.Manifest
		v.Failures = append(v.Failures, manifest.Compare(c.Artifact, &v.Result)...)
	}
	if f, err := artifact.Open(c.Artifact); err == nil { // Verify has said why not
		v.Profile = convert.CheckProfile(f)
		f.Close()
		v.Failures = append(v.Failures, v.Profile.Failures...)
		if v.Profile.Dialect == "" {
			v.Unchecked = append(v.Unchecked, "the inventory: this program does not know the model")
		}
	}
	v.Passed = len(v.Failures) == 0
	if err := printJSON(e, &v); err != nil {
		return err
	}
	if !v.Passed {
		return c.failed(e, v.Failures)
	}
	if c.WriteManifest {
		if err := artifact.WriteManifest(c.Artifact, &v.Result); err != nil {
			return err
		}
		e.say("wrote %s", artifact.ManifestPath(c.Artifact))
	}
	return c.writeSums(e, v.FileSHA256)
}

// readManifest reads the manifest that is asked for, or ours beside the artifact. It stands in for a report where there is none.
func (c *verifyCommand) readManifest(e *environment, o *artifact.Options) (*artifact.Manifest, error) {
	path := c.Manifest
	if path == "" {
		path = artifact.ManifestPath(c.Artifact)
		if _, err := os.Stat(path); err != nil {
			return nil, nil
		}
	}
	m, err := artifact.ReadManifest(path)
	if c.Manifest == "" && errors.Is(err, artifact.ErrForeignManifest) {
		e.say("%v: it is ignored", err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	c.Manifest = path
	if o.Report == "" && !exists(artifact.ReportPath(c.Artifact)) && !exists(artifact.UpgradeReportPath(c.Artifact)) {
		o.Report = path
	}
	return m, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func (c *verifyCommand) verifyV2(e *environment, o artifact.Options) error {
	if c.Report != "" || c.Against != "" || c.Manifest != "" || c.WriteManifest {
		return usagef("--report, --against, --manifest and --write-manifest are not for version 2 files")
	}
	r, err := artifact.VerifyV2(c.Artifact, o)
	if err != nil {
		return err
	}
	if err := printJSON(e, &r); err != nil {
		return err
	}
	if !r.Passed {
		return c.failed(e, r.Failures)
	}
	return c.writeSums(e, r.FileSHA256)
}

func (c *verifyCommand) writeSums(e *environment, files []artifact.FileDigest) error {
	if !c.WriteSums {
		return nil
	}
	if err := artifact.WriteSums(c.Artifact, files); err != nil {
		return err
	}
	e.say("entered %d files into %s", len(files), artifact.SumsPath(c.Artifact))
	return nil
}

func (c *verifyCommand) failed(e *environment, failures []string) error {
	for _, f := range failures {
		e.say("%s", f)
	}
	return statusError(exitFailure)
}

// printJSON writes a value to stdout, indented, with a final newline.
func printJSON(e *environment, v any) error {
	b, err := json.Marshal(v, jsontext.WithIndent(" "))
	if err != nil {
		return err
	}
	_, err = e.out.Write(append(b, '\n'))
	return err
}

type inspectCommand struct {
	Artifact  string `arg:"" optional:"" help:"Entry file. Default: nano, the model inside the program."`
	Objects   bool   `help:"List the objects."`
	Bindings  bool   `help:"List the parameters and the objects they are bound to."`
	Resources bool   `help:"List the embedded files."`
	JSON      bool   `name:"json" help:"Everything as one JSON object."`
}

// inspection is inspect's JSON form.
type inspection struct {
	Artifact     string              `json:"artifact"`
	Container    int                 `json:"container_version"`
	ArtifactID   string              `json:"artifact_id,omitzero"` // version 2 has none
	ModelID      string              `json:"model_id,omitzero"`    // of version 2 only
	WeightsID    string              `json:"weights_id,omitzero"`
	Name         string              `json:"name,omitzero"`
	Architecture jsontext.Value      `json:"architecture,omitzero"`
	Components   []string            `json:"components,omitzero"`
	Objects      int                 `json:"objects"`
	Bindings     int                 `json:"bindings"`
	Uses         int                 `json:"uses"`
	PayloadBytes int64               `json:"payload_bytes"`
	Formats      map[string]*tally   `json:"formats"`
	Files        []fileState         `json:"files"`
	Provenance   jsontext.Value      `json:"provenance,omitzero"`
	ObjectList   []objectLine        `json:"object_list,omitzero"`
	BindingList  map[string][]string `json:"binding_list,omitzero"`
	ResourceList []objectLine        `json:"resource_list,omitzero"`
}

type tally struct {
	Objects int   `json:"objects"`
	Bytes   int64 `json:"bytes"`
}

type fileState struct {
	Path  string `json:"path"`
	Bytes int64  `json:"bytes"`
	State string `json:"state"`
}

type objectLine struct {
	ID     string `json:"id"`
	Shape  []int  `json:"shape,omitzero"`
	Format string `json:"format"`
	Layout string `json:"layout,omitzero"`
	Offset int64  `json:"offset"`
	Bytes  int64  `json:"bytes"`
}

func (c *inspectCommand) Run(e *environment) error {
	if c.Artifact != "" && artifact.IsV2(c.Artifact) {
		return c.runV2(e)
	}
	f, err := openArtifact(e, c.Artifact)
	if err != nil {
		return err
	}
	defer f.Close()
	return c.print(e, c.inspect(f))
}

// runV2 shows a version 2 file: what it says of itself is its identity and its objects.
func (c *inspectCommand) runV2(e *environment) error {
	f, err := artifact.OpenV2(c.Artifact)
	if err != nil {
		return err
	}
	defer f.Close()
	in := inspection{
		Artifact: f.Path(), Container: 2, ModelID: f.ModelID, WeightsID: f.WeightsID, Objects: len(f.Objects), PayloadBytes: f.PayloadBytes(),
		Formats: map[string]*tally{}, Files: []fileState{{f.Path(), f.Size(), "present"}},
	}
	c.objects(&in, f.Objects)
	return c.print(e, in)
}

func (c *inspectCommand) print(e *environment, in inspection) error {
	if c.JSON {
		return printJSON(e, in)
	}
	fmt.Fprintf(e.out, "artifact    %s\n", in.Artifact)
	if in.Container == 2 {
		fmt.Fprintf(e.out, "container   version 2: ninfer upgrade turns it into an artifact\nidentity    %s / %s\n", in.ModelID, in.WeightsID)
	} else {
		fmt.Fprintf(e.out, "id          %s\n", in.ArtifactID)
	}
	if in.Name != "" {
		fmt.Fprintf(e.out, "name        %s\n", in.Name)
	}
	if in.Architecture != nil {
		fmt.Fprintf(e.out, "model       %s\n", in.Architecture)
	}
	if in.Container != 2 {
		fmt.Fprintf(e.out, "components  %v\nbindings    %d\nuses        %d\n", in.Components, in.Bindings, in.Uses)
	}
	fmt.Fprintf(e.out, "objects     %d\npayload     %d bytes\n", in.Objects, in.PayloadBytes)
	for _, o := range sorted(in.Formats) {
		fmt.Fprintf(e.out, "format      %-20s %5d objects %16d bytes\n", o, in.Formats[o].Objects, in.Formats[o].Bytes)
	}
	missing := 0
	for _, p := range in.Files {
		fmt.Fprintf(e.out, "file        %s  %d bytes  %s\n", p.Path, p.Bytes, p.State)
		if p.State != "present" {
			missing++
		}
	}
	if missing > 0 {
		e.say("%s: %d of %d files cannot be used; the directory above is complete", c.Artifact, missing, len(in.Files))
	}
	for _, o := range in.ResourceList {
		fmt.Fprintf(e.out, "resource    %s  %d bytes at %d\n", o.ID, o.Bytes, o.Offset)
	}
	for _, o := range in.ObjectList {
		fmt.Fprintf(e.out, "object      %s  %v %s %s  %d bytes at %d\n", o.ID, o.Shape, o.Format, o.Layout, o.Bytes, o.Offset)
	}
	for _, name := range sorted(in.BindingList) {
		fmt.Fprintf(e.out, "binding     %s  %v\n", name, in.BindingList[name])
	}
	return nil
}

func (c *inspectCommand) inspect(f *artifact.File) inspection {
	d := f.Directory()
	in := inspection{
		Artifact: f.Path(), Container: 3, ArtifactID: artifact.FormatID(f.ID()), Objects: len(d.Objects), Bindings: d.Bindings.Len(), Uses: len(d.Uses),
		PayloadBytes: f.PayloadBytes(), Formats: map[string]*tally{}, Provenance: d.Provenance,
	}
	var meta struct {
		Name string `json:"name"`
	}
	if json.Unmarshal(d.Metadata, &meta) == nil {
		in.Name = meta.Name
	}
	for _, k := range d.Components {
		in.Components = append(in.Components, k.ID)
	}
	if text, ok := d.Component("text"); ok {
		var config struct {
			Architectures jsontext.Value `json:"architectures"`
		}
		if json.Unmarshal(text.Config, &config) == nil {
			in.Architecture = config.Architectures
		}
	}
	c.objects(&in, d.Objects)
	if c.Bindings {
		in.BindingList = map[string][]string{}
		for name, b := range d.Bindings.All() {
			list := []string{b.Object}
			if b.Object == "" {
				list = list[:0]
				for _, p := range b.Parts {
					list = append(list, fmt.Sprintf("%s[%d:%d]", p.Object, p.Begin, p.End))
				}
			}
			in.BindingList[name] = list
		}
	}
	for _, p := range f.Parts() {
		state := "present"
		switch {
		case p.Missing:
			state = "missing"
		case p.Err != nil:
			state = p.Err.Error()
		}
		in.Files = append(in.Files, fileState{p.Path, p.Bytes, state})
	}
	return in
}

// objects fills the counts by format and the lists that are asked for.
func (c *inspectCommand) objects(in *inspection, objects []artifact.Object) {
	for _, o := range objects {
		line := objectLine{o.ID, o.Shape, o.Format, o.Layout, o.Offset, o.Bytes}
		if o.Resource {
			line.Format = o.Encoding
			if c.Resources || c.JSON {
				in.ResourceList = append(in.ResourceList, line)
			}
		}
		if c.Objects && !o.Resource {
			in.ObjectList = append(in.ObjectList, line)
		}
		t := in.Formats[line.Format]
		if t == nil {
			t = &tally{}
			in.Formats[line.Format] = t
		}
		t.Objects++
		t.Bytes += o.Bytes
	}
}
