package cli

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"

	"ninfer/internal/artifact"
)

type verifyCommand struct {
	Artifact    string `arg:"" help:"Entry file."`
	FileDigests bool   `help:"Also compare the SHA-256 of every file with SHA256SUMS beside the artifact and with known releases."`
	Sums        string `name:"sha256sums" placeholder:"FILE" help:"Checksum list to compare with."`
	Against     string `placeholder:"FILE" help:"Another artifact that must hold the same."`
	Report      string `placeholder:"FILE" help:"Conversion or upgrade report; default: the one beside the artifact."`
}

func (c *verifyCommand) Run(e *environment) error {
	r, err := artifact.Verify(c.Artifact, artifact.Options{Report: c.Report, FileDigests: c.FileDigests, SHA256SUMS: c.Sums, Against: c.Against})
	if err != nil {
		return err
	}
	if err := printJSON(e, r); err != nil {
		return err
	}
	for _, f := range r.Failures {
		e.say("%s", f)
	}
	if !r.Passed {
		return statusError(exitFailure)
	}
	return nil
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
	Artifact  string `arg:"" help:"Entry file."`
	Objects   bool   `help:"List the objects."`
	Bindings  bool   `help:"List the parameters and the objects they are bound to."`
	Resources bool   `help:"List the embedded files."`
	JSON      bool   `name:"json" help:"Everything as one JSON object."`
}

// inspection is inspect's JSON form.
type inspection struct {
	Artifact     string              `json:"artifact"`
	ArtifactID   string              `json:"artifact_id"`
	Name         string              `json:"name,omitzero"`
	Architecture jsontext.Value      `json:"architecture,omitzero"`
	Components   []string            `json:"components"`
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
	f, err := artifact.Open(c.Artifact)
	if err != nil {
		return err
	}
	defer f.Close()
	in := c.inspect(f)
	if c.JSON {
		return printJSON(e, in)
	}
	fmt.Fprintf(e.out, "artifact    %s\nid          %s\n", in.Artifact, in.ArtifactID)
	if in.Name != "" {
		fmt.Fprintf(e.out, "name        %s\n", in.Name)
	}
	if in.Architecture != nil {
		fmt.Fprintf(e.out, "model       %s\n", in.Architecture)
	}
	fmt.Fprintf(e.out, "components  %v\nobjects     %d\nbindings    %d\nuses        %d\npayload     %d bytes\n", in.Components, in.Objects, in.Bindings, in.Uses, in.PayloadBytes)
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
		Artifact: f.Path(), ArtifactID: artifact.FormatID(f.ID()), Objects: len(d.Objects), Bindings: d.Bindings.Len(), Uses: len(d.Uses),
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
	for _, o := range d.Objects {
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
